#!/usr/bin/env bash
# Sets up and starts everything: an environment that meets requirements.txt, then torchrun.
#
#   bash launch.sh                     the embedded default: makes pictures and a tiny model, trains, draws
#   bash launch.sh --flag value ...    grpo.py with your flags, then the curves (tools/monitor.py)
#   bash launch.sh --plan ...          what one GPU would hold with these flags; 0: it fits, 1: it does not
#   bash launch.sh pytest [args]       the tests; their paths are relative to this folder
#
# Variables: PYTHON (python3) · NPROC (all visible GPUs; without a GPU 1, and NPROC=2 is two CPU processes) ·
# NNODES NODE_RANK MASTER_ADDR MASTER_PORT, or SLURM's own under `srun --ntasks-per-node=1` ·
# OMP_NUM_THREADS (on CPU: cores / processes) · DEMO_SEED (a seed for the embedded default).
# The exit status is what the ranks left in exit_status in the output directory (torchrun turns every failure
# into 1: 2 for what the user can mend, 3 out of memory, 4 hung), else 143 or 130 after SIGTERM or SIGINT, else torchrun's.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
die() { echo "launch.sh: $*" >&2; exit 2; }

# ---- An environment. Metadata tells in 0.2 s what is installed; importing torch, transformers and deepspeed
# ---- takes 10. packaging comes with transformers.
meets() { # PYTHON FILE...
  "$1" - "${@:2}" <<'PY'
import sys
from importlib.metadata import PackageNotFoundError, version
sys.path = [path for path in sys.path if path]  # the caller's folder is no place to find packages in
try:
    from packaging.requirements import Requirement
    lines = [line.split("#")[0].strip() for path in sys.argv[1:] for line in open(path, encoding="utf-8")]
    for need in map(Requirement, filter(None, lines)):
        if not need.specifier.contains(version(need.name), prereleases=True):
            sys.exit(f"{sys.executable} has {need.name} {version(need.name)}, not {need}")
except (ImportError, PackageNotFoundError) as error:
    sys.exit(f"{sys.executable}: {error}")
PY
}
python=$(command -v -- "${PYTHON:-python3}") || die "${PYTHON:-python3} not found: install Python 3.10 or newer, or set PYTHON"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "$python is too old: set PYTHON to a 3.10 or newer"
needs=("$here/requirements.txt")
if [[ ${1-} == pytest ]]; then needs+=("$here/requirements-test.txt"); fi
if ! lack=$(meets "$python" "${needs[@]}" 2>&1); then
  venv=$here/.venv
  exec 9>"$venv.lock" # the nodes of a job may share this folder: one installs, the others wait
  if command -v flock >/dev/null; then flock 9; fi
  if ! [[ -x $venv/bin/python ]] || ! meets "$venv/bin/python" "${needs[@]}" 2>/dev/null; then
    echo "launch.sh: $lack"
    echo "launch.sh: installing into $venv (with CUDA 6 GB, a few minutes); $python stays as it is"
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet "${needs[@]/#/--requirement=}"
  fi
  exec 9>&-
  python=$venv/bin/python
fi
if [[ ${1-} == pytest ]]; then cd -- "$here" && exec "$python" -m pytest "${@:2}"; fi
for word in "$@"; do
  if [[ $word == --plan ]]; then exec "$python" "$here/tools/plan.py" "$@"; fi
done

# ---- Running a command in a process group of its own (set -m): Ctrl-C reaches it once, through us, and it does
# ---- not start with SIGINT ignored. A trapped signal ends `wait` early: wait on until the process is gone.
child='' signal='' starting=''
forward() { # SIGNAL STATUS; once: torchrun gives up waiting for its ranks at a second one
  if [[ $signal ]]; then return; fi
  signal=$2 name=$1
  if [[ $starting ]]; then return; fi # `run` passes it on as soon as it knows the child
  if [[ -z $child ]] || ! kill -s "$1" "$child" 2>/dev/null; then exit "$signal"; fi
}
trap 'forward TERM 143' TERM
trap 'forward INT 130' INT
trap 'forward TERM 129' HUP
trap 'forward TERM 138' USR1 # SLURM's --signal=B:USR1
trap '' PIPE                 # whoever read our output is gone: the run goes on
run() {
  printf '%q ' "$@"; echo
  starting=yes; set -m; "$@" & child=$!; set +m; starting=''
  if [[ $signal ]]; then kill -s "$name" "$child" 2>/dev/null || true; fi
  status=0; wait "$child" || status=$?
  while kill -0 "$child" 2>/dev/null; do status=0; wait "$child" || status=$?; done
  return "${signal:-$status}"
}

# ---- What to train, and where its exit_status will be
if [[ $# == 0 ]]; then
  run "$python" "$here/tools/demo.py" --output runs/demo ${DEMO_SEED:+--seed "$DEMO_SEED"}
  mapfile -t flags <runs/demo/flags.txt
  set -- "${flags[@]}"
fi
output='' run_name=grpo draw=yes by_hand='' previous=''
for word in "$@"; do
  case $previous in --output[_-]dir) output=$word ;; --run[_-]name) run_name=$word ;; esac
  case $word in
    --output[_-]dir=*) output=${word#*=} ;;
    --run[_-]name=*) run_name=${word#*=} ;;
    --max[_-]tokens[_-]per[_-]forward*) by_hand=yes ;;
    --eval[_-]only | -h | --help) draw=no ;;
  esac
  previous=$word
done
output=${output:-runs/$run_name}

# ---- Processes, nodes and port
read -r gpus cores free_port < <("$python" -c '
import os, random, socket, torch
for port in random.sample(range(20000, 60001), 1000):
    try:
        with socket.socket() as probe:
            probe.bind(("", port))
        break
    except OSError:
        continue  # taken
print(torch.cuda.device_count(), len(os.sched_getaffinity(0)), port)')
nproc=${NPROC:-$((gpus > 0 ? gpus : 1))}
[[ $nproc =~ ^[1-9][0-9]*$ ]] || die "NPROC=$nproc is no number of processes"
((gpus == 0 || nproc <= gpus)) || die "NPROC=$nproc, but $gpus GPUs are visible: at most one process a GPU"
settings=(env)
if ((gpus == 0)); then # torchrun would leave each process one thread; threads that spin while they wait slow the others
  settings+=("DS_ACCELERATOR=${DS_ACCELERATOR:-cpu}" "OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}" "OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > nproc ? cores / nproc : 1))}")
fi
nodes=${NNODES:-${SLURM_NNODES:-1}} node_rank=${NODE_RANK:-${SLURM_NODEID:-0}}
address=${MASTER_ADDR:-} port=${MASTER_PORT:-}
if [[ $nodes == 1 ]]; then
  address=${address:-127.0.0.1} port=${port:-$free_port}
else # every node has to come to the same address and port by itself
  if [[ -z $address && -n ${SLURM_JOB_NODELIST:-} ]] && command -v scontrol >/dev/null; then
    read -r address < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  fi
  if [[ -z $port && -n ${SLURM_JOB_ID:-} ]]; then port=$((20000 + SLURM_JOB_ID % 40001)); fi
  [[ $address && $port ]] || die "NNODES=$nodes: set MASTER_ADDR (the host of node 0) and MASTER_PORT, the same on every node"
fi

# ---- Train. Rank 0 and exit_status are on node 0.
status=0 left=$(mktemp -d) # where this launch's ranks leave their status: others may name the same output folder
trap 'rm -rf -- "$left"' EXIT
settings+=("GRPO_STATUS=$left")
sampler='' # of the GPUs; it also ends by itself, seconds after this shell
if ((gpus > 0)) && [[ $node_rank == 0 && $draw == yes ]]; then
  "$python" "$here/tools/monitor.py" --sample "$output" $$ & sampler=$!
fi
retry=()
for again in 1 2 3 ''; do # out of memory: up to three times again, with half the tokens in a forward
  status=0
  run "${settings[@]}" "$python" -m torch.distributed.run --nnodes "$nodes" --node_rank "$node_rank" \
    --nproc_per_node "$nproc" --master_addr "$address" --master_port "$port" "$here/grpo.py" "$@" "${retry[@]}" || status=$?
  if [[ -s $left/exit_status ]]; then
    written=$(<"$left/exit_status")
    if [[ -z $signal && $written =~ ^[0-9]+$ ]]; then status=$written; fi
    if [[ $status == 3 ]]; then "$python" "$here/tools/plan.py" --plan_gpus $((nodes * nproc)) "$@" "${retry[@]}" || true; fi
    if [[ $status != 0 && -s $left/exit_message ]]; then cat -- "$left/exit_message" >&2 || true; fi # torchrun buries it
    if [[ $node_rank == 0 && -d $output ]]; then cp -- "$left"/exit_* "$output/" || true; fi
    if [[ $node_rank == 0 && $status == 4 ]]; then "$python" "$here/tools/monitor.py" --hang "$output" >&2 || true; fi
  elif [[ $node_rank == 0 && $status == 0 ]]; then
    status=1
    echo "launch.sh: the processes ended without saying how: something in them left Python, os._exit for one" >&2 || true
  fi
  if [[ $status != 3 || $signal || -z $again || $by_hand || ! -s $left/retry ]]; then break; fi
  if [[ $nodes != 1 ]]; then
    echo "launch.sh: several nodes are not started again by themselves: do it on each, with these flags" >&2 || true
    break
  fi
  mapfile -t retry <"$left/retry"
  rm -f -- "$left"/*
  echo "launch.sh: out of memory; starting again, $again of 3, with ${retry[*]}" >&2 || true
done
if jobs -rp | grep -qx -- "$sampler"; then kill "$sampler"; fi # its number may be another's once it is gone
if [[ $status == 0 && $draw == yes && $node_rank == 0 ]]; then
  run "$python" "$here/tools/monitor.py" "$output" || echo "launch.sh: the run is whole, its curves could not be drawn" >&2
fi
exit "$status"
