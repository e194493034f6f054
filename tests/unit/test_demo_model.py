"""The demo model in examples/model: its files, its tokenizer, its chat template and what it was taught."""

import json
import struct
import tomllib
from pathlib import Path

import jinja2
import pytest
from tokenizers import Tokenizer

MODEL = Path(__file__).parents[2] / "examples" / "model"
WEIGHTS = MODEL / "weights"
BLOCK = 128  # tokens in a KV block of vLLM's CPU engine
SIZE_LIMIT = 6 * 2**20


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(WEIGHTS / "tokenizer.json"))


@pytest.fixture(scope="module")
def pairs() -> list[dict]:
    with (MODEL / "qa.toml").open("rb") as file:
        return tomllib.load(file)["pair"]


def load_json(name: str) -> dict:
    return json.loads((WEIGHTS / name).read_text())


def render(messages: list[dict], *, add_generation_prompt: bool = True) -> str:
    template = (WEIGHTS / "chat_template.jinja").read_text()
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)  # as transformers and vLLM render it
    return environment.from_string(template).render(
        messages=messages, add_generation_prompt=add_generation_prompt, bos_token="<bos>", eos_token="<eos>"
    )


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def tensors() -> dict[str, dict]:
    with (WEIGHTS / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header


def test_the_weights_are_small_enough_for_a_repository():
    assert (WEIGHTS / "model.safetensors").stat().st_size <= SIZE_LIMIT
    assert sum(path.stat().st_size for path in WEIGHTS.iterdir()) <= SIZE_LIMIT + 2**16


def test_the_config_is_a_llama_that_every_attention_backend_takes():
    config = load_json("config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] >= 1024
    assert config["head_dim"] == 64
    assert config["num_key_value_heads"] % 2 == 0, "tensor parallel size 2 must be able to split the heads"


def test_the_tensors_are_those_of_the_config():
    config, header = load_json("config.json"), tensors()
    hidden, heads, kv_heads, size = (
        config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    assert header["model.embed_tokens.weight"]["shape"] == [config["vocab_size"], hidden]
    assert header["lm_head.weight"]["shape"] == [config["vocab_size"], hidden]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.self_attn"
        assert header[f"{prefix}.q_proj.weight"]["shape"] == [heads * size, hidden]
        assert header[f"{prefix}.k_proj.weight"]["shape"] == [kv_heads * size, hidden]
        assert header[f"{prefix}.v_proj.weight"]["shape"] == [kv_heads * size, hidden]
    end = max(tensor["data_offsets"][1] for tensor in header.values())
    with (WEIGHTS / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
    assert (WEIGHTS / "model.safetensors").stat().st_size == 8 + length + end, "the file is cut off"


def test_eos_ends_an_answer(tokenizer):
    eos = tokenizer.token_to_id("<eos>")
    assert eos == load_json("config.json")["eos_token_id"] == load_json("generation_config.json")["eos_token_id"]
    assert encode(tokenizer, "Yes.<eos>")[-1] == eos


def test_every_token_is_one_byte(tokenizer):
    for text in ["What is xpyd?", "tab\tand\r\nlines\n\n", "Grüße, 世界 🙂", "".join(map(chr, range(256)))]:
        ids = encode(tokenizer, text)
        assert len(ids) == len(text.encode())
        assert tokenizer.decode(ids) == text
    assert tokenizer.get_vocab_size() == load_json("config.json")["vocab_size"] == 256 + 2


def test_the_shortest_chat_spans_more_than_two_blocks(tokenizer):
    prompt = render([{"role": "user", "content": "Hi"}])
    assert prompt.startswith("<bos>")
    assert prompt.endswith("User: Hi\nAssistant: ")
    assert len(encode(tokenizer, prompt)) > 2 * BLOCK


def test_a_chat_of_several_turns_keeps_what_was_said():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "What is xpyd?"},
    ]
    assert render(messages).endswith(
        "\n\nSystem: Be brief.\nUser: Hi\nAssistant: Hello!<eos>\nUser: What is xpyd?\nAssistant: "
    )
    assert render(messages, add_generation_prompt=False).endswith("User: What is xpyd?\n")


def test_the_longest_question_and_answer_fit_the_context(tokenizer, pairs):
    limit = load_json("config.json")["max_position_embeddings"]
    longest = max((q for pair in pairs for q in pair["questions"]), key=len)
    prompt = encode(tokenizer, render([{"role": "user", "content": longest}]))
    assert len(prompt) + max(len(pair["answer"]) for pair in pairs) < limit


def test_the_questions_are_well_formed(pairs):
    assert 40 <= len(pairs) <= 80
    for pair in pairs:
        assert pair.keys() == {"questions", "unseen", "answer"}
        assert len(pair["questions"]) >= 3, pair["answer"]
        for text in [*pair["questions"], pair["unseen"], pair["answer"]]:
            assert text.strip() == text != ""
            assert text.isascii()
            assert "\n" not in text
        assert len(pair["answer"]) <= 200, pair["answer"]


def test_no_question_and_no_answer_stands_twice(pairs):
    questions = [q for pair in pairs for q in [*pair["questions"], pair["unseen"]]]
    assert sorted(questions) == sorted(set(questions))
    # The same words, whatever their case and punctuation, must not lead to two answers.
    words = [q for pair in pairs for q in {q.lower().rstrip("?.!") for q in [*pair["questions"], pair["unseen"]]}]
    assert sorted(words) == sorted(set(words))
    answers = [pair["answer"] for pair in pairs]
    assert sorted(answers) == sorted(set(answers))
