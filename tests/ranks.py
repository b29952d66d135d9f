"""Run a function on several ranks, each a process forked from the test's: 2 s instead of a launcher's 10."""

import faulthandler
import multiprocessing
import os
import socket
import sys
import traceback


def _child(function, rank, world, port, arguments, results, timeout):
    import torch

    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(timeout - 5, file=sys.__stderr__)  # where it hangs, if it does
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    try:
        results.put((rank, function(*arguments), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    results.close()
    results.join_thread()
    os._exit(0)  # no clean-up of what belongs to the parent


def run_ranks(world, function, *arguments, timeout=100):
    """What `function(*arguments)` returns on each of `world` ranks, in order. Raises with a rank's own traceback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    start = lambda rank: context.Process(target=_child, args=(function, rank, world, port, arguments, results, timeout))  # noqa: E731
    children = [start(rank) for rank in range(world)]
    for child in children:
        child.start()
    found = {}
    try:
        for _ in children:
            rank, value, error = results.get(timeout=timeout)
            assert error is None, f"rank {rank}:\n{error}"
            found[rank] = value
    finally:
        for child in children:
            if len(found) < world:
                child.kill()
            child.join(10)
    return [found[rank] for rank in range(world)]
