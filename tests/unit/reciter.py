"""A model that recites: each token is followed by the one that the test wants, whatever was before.

One-hot embeddings pass layers that add nothing, and the head is the table of successors.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

END = "<|end|>"
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|again|>")
_CERTAIN = 4.0


def write_reciter(
    folder: Path,
    answers: Mapping[str, Sequence[str]],
    *,
    chat_template: str,
    special: Sequence[str] = (),
) -> Path:
    """A model folder. After the token ``cue`` it samples the pieces ``answers[cue]`` and then ends.

    Every piece is one token, and in one folder it is always followed by the same. Pieces in
    ``special`` are special tokens. Other text is a token per byte.
    """
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END), *map(AddedToken, special)])
    pieces = dict.fromkeys([*_ROLES, *(piece for said in answers.values() for piece in said)])
    plain = [AddedToken(piece, normalized=False) for piece in pieces if piece not in special]
    tokenizer.add_tokens(plain)
    vocab_size = tokenizer.get_vocab_size()
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=vocab_size,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.token_to_id(END),
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(vocab_size))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for cue, said in answers.items():
            for piece, following in pairwise([cue, *said, END]):
                place = tokenizer.token_to_id(following), tokenizer.token_to_id(piece)
                model.lm_head.weight[place] = _CERTAIN
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    return folder
