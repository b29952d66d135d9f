"""Make the reference work of the measurements on disk: a 3B-shaped random policy and noise pictures.

    python bench/work.py --output runs/w1 --tokenizer FOLDER_OF_A_QWEN_TOKENIZER

writes runs/w1/model (Qwen2.5-VL-3B-Instruct's published architecture, weights random with std 0.02, bf16), and
runs/w1/data.jsonl with 640x480 noise pictures and referring expressions, so that

    bash launch.sh --model_name_or_path runs/w1/model --data_file_paths runs/w1/data.jsonl --image_folders runs/w1

trains on them, with --reward_funcs bench/work.py:distinct, since random weights never answer in the right form. Speed
and memory do not depend on what the weights have learned. With the real tokenizer and the REC prompt a record is some
470 tokens, and random weights practically never sample the end, so completions run to --max_completion_length.
"""

import argparse
import json
import os

import numpy as np
import torch
from PIL import Image
from transformers import AutoTokenizer, GenerationConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil


def distinct(prompts, completions, **columns):
    """A reward that differs within a group whatever the policy writes: the share of distinct characters."""
    return [len(set(text)) / max(1, len(text)) for text in completions]


SHAPES = {  # of https://huggingface.co/Qwen/Qwen2.5-VL-3B-Instruct/blob/main/config.json and its sisters':
    # hidden size, of the MLP, layers, heads, key heads, vocabulary, of the vision tower's MLP
    "3B": (2048, 11008, 36, 16, 2, 151936, 3420),
    "7B": (3584, 18944, 28, 28, 4, 152064, 3420),
    "72B": (8192, 29568, 80, 64, 8, 152064, 3456),
}


def config(name="3B"):
    hidden, inner, layers, heads, key_heads, vocabulary, vision_inner = SHAPES[name]
    text = dict(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=128000,
        rms_norm_eps=1e-6,
        bos_token_id=151643,
        eos_token_id=151645,
        use_sliding_window=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    )
    vision = dict(
        depth=32,
        hidden_size=1280,
        intermediate_size=vision_inner,
        num_heads=16,
        out_hidden_size=hidden,
        patch_size=14,
        spatial_merge_size=2,
        temporal_patch_size=2,
        window_size=112,
        fullatt_block_indexes=[7, 15, 23, 31],
    )
    ids = dict(vision_start_token_id=151652, vision_end_token_id=151653, image_token_id=151655, video_token_id=151656)
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=name == "3B", **ids)


def write_model(folder, tokenizer):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(config()).bfloat16()
    model = model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02)
        else:
            parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)
    model.tie_weights()
    model.generation_config = GenerationConfig(eos_token_id=[151645, 151643], pad_token_id=151643)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    Qwen2VLImageProcessorPil(min_pixels=3136, max_pixels=12845056).save_pretrained(folder)


def write_data(folder, records=64):
    rng = np.random.default_rng(0)
    os.makedirs(os.path.join(folder, "pictures"), exist_ok=True)
    with open(os.path.join(folder, "data.jsonl"), "w") as file:
        for i in range(records):
            name = f"pictures/{i:03d}.png"
            noise = rng.integers(0, 256, (480, 640, 3), dtype=np.uint8)
            Image.fromarray(noise).save(os.path.join(folder, name), compress_level=1)
            question = "Please provide the bounding box coordinate of the region this sentence describes: the red cup."
            answer = json.dumps([100, 100, 300, 300])
            turns = [{"from": "human", "value": "<image>" + question}, {"from": "gpt", "value": answer}]
            file.write(json.dumps({"id": i, "image": name, "conversations": turns}) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    parser.add_argument("--tokenizer", required=True)
    args = parser.parse_args()
    os.makedirs(args.output, exist_ok=True)
    write_model(os.path.join(args.output, "model"), args.tokenizer)
    write_data(args.output)
