"""What the tests share: tiny random checkpoints of the three families, written to disk and loaded back by name."""

import os
import signal
import sys
import threading

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import model as model_module

tqdm.set_lock(threading.RLock())  # its own is shared with forked ranks: one that is killed may keep it for ever

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a script's background job; bash could not listen to it either
    signal.signal(signal.SIGINT, signal.default_int_handler)

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
SPECIALS += ["<|video_pad|>"]


def byte_tokenizer():
    """A byte-level tokenizer with Qwen's special tokens: any text, 263 ids, made offline."""
    vocab = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.add_special_tokens({"additional_special_tokens": SPECIALS})
    return fast


def tiny_config(family, tokenizer, layers=2):
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in (
            ("image", "image_pad"),
            ("video", "video_pad"),
            ("vision_start", "vision_start"),
            ("vision_end", "vision_end"),
        )
    }
    text = dict(
        vocab_size=len(tokenizer) + 5,  # real vocabularies are padded too
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        bos_token_id=tokenizer.convert_tokens_to_ids("<|im_start|>"),
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
    )
    vision = dict(depth=3, patch_size=14, temporal_patch_size=2, spatial_merge_size=2)
    if family == "qwen2_vl":
        vision |= dict(embed_dim=32, hidden_size=64, num_heads=2, mlp_ratio=2)
    elif family == "qwen2_5_vl":
        vision |= dict(hidden_size=32, out_hidden_size=64, num_heads=2, intermediate_size=52)  # no multiple of 8
        vision |= dict(fullatt_block_indexes=[1], window_size=56)
    else:
        vision |= dict(hidden_size=32, out_hidden_size=64, num_heads=2, intermediate_size=48)
        vision |= dict(num_position_embeddings=64, deepstack_visual_indexes=[0, 1])
        text |= dict(head_dim=16, num_hidden_layers=layers + 1)  # so that both deepstack layers reach the output
    cls = transformers.AutoConfig.for_model(family).__class__
    return cls(text_config=text, vision_config=vision, tie_word_embeddings=family != "qwen2_vl", **ids)


def write_checkpoint(folder, family, seed=0):
    """A checkpoint folder such as the hub holds: safetensors, config, generation config, tokenizer, processor."""
    torch.manual_seed(seed)
    tokenizer = byte_tokenizer()
    config = tiny_config(family, tokenizer)
    model = getattr(transformers, model_module.FAMILIES[family][0])(config).float()
    for parameter in model.parameters():  # larger than the initializer's 0.02, so that a wrong mask shows
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    # what real generation configs carry, and every sampler that trains on its own log-probs must ignore
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, top_k=5, temperature=0.3, repetition_penalty=1.3, pad_token_id=config.text_config.pad_token_id
    )
    model.generation_config.eos_token_id = [config.text_config.eos_token_id, config.text_config.pad_token_id]
    model.save_pretrained(folder)
    tokenizer.chat_template = model_module.CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 64).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """family -> folder of a tiny random checkpoint."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: write_checkpoint(root / family, family) for family in model_module.FAMILIES}
