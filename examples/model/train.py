"""Train the demo model: a byte-level Llama of 1.9 million parameters that knows qa.toml by heart.

xpyd's demo has to print a readable answer on a machine without a GPU and without a network, so the repository
carries a model that vLLM serves like any other Llama. It is a toy that recites; but it attends to the whole prompt,
so a KV block that is lost or swapped on its way from prefill to decode can show as garbled text.

    python examples/model/train.py     # writes examples/model/weights; exits with 1 if one answer is not exact

- A row is a conversation of some turns as the chat template renders it, or a list of turns "Q: ... A: ..."; the loss
  counts the answers' bytes only. Wordings vary at random, so that some that are not in qa.toml find the answer too.
- An answer is exact when greedy decoding yields it and then <eos>. On the way one forward pass tells that: every byte
  is the likeliest after the true bytes before it. At the end the saved files are loaded and really decoded.
"""

import argparse
import math
import random
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
CONTEXT, LENGTH = 1024, 704  # tokens the model can attend to; tokens in a row of a batch
IGNORE = -100  # the label that the loss skips
BOS, EOS = 0, 1
# So long that the shortest chat fills two KV blocks of 128 tokens and a part of a third: the demo then moves several.
PREAMBLE = (
    "This is a conversation with the demo model of xpyd, which serves language models with prefill and decode on "
    "separate engines. The user asks questions about xpyd, and the assistant answers each in a few plain sentences.\n"
    "It knows no other subject.\n\n"
)
CHAT_TEMPLATE = (
    "{{ bos_token }}" + PREAMBLE + "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token + '\n' }}"
    "{% elif message['role'] == 'system' %}{{ 'System: ' + message['content'] + '\n' }}"
    "{% else %}{{ 'User: ' + message['content'] + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
# Chat clients often send a line like these, so the model gets used to reading past it.
SYSTEMS = ("You are a helpful assistant.", "Be brief.", "Answer in English.", "You are an expert. Answer politely.")
OPENINGS = ("Please tell me: ", "Hi, ", "Hello! ", "Can you tell me: ", "So, ", "I want to know: ", "Question: ")
FILLERS = frozenset({"the", "a", "an", "is", "are", "do", "does", "there", "of", "for"})  # may be left out


@dataclass(frozen=True)
class Pair:
    """One answer, the wordings that are trained to lead to it, and one that is only tried at the end."""

    questions: tuple[str, ...]
    unseen: str
    answer: str


def read_pairs(path: Path) -> list[Pair]:
    with path.open("rb") as file:
        return [Pair(tuple(p["questions"]), p["unseen"], p["answer"]) for p in tomllib.load(file)["pair"]]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte and no merges: nothing to learn, and lengths in tokens are lengths in bytes."""
    letters = {char: i + 2 for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab={"<bos>": BOS, "<eos>": EOS, **letters}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model() -> LlamaForCausalLM:
    """Head size 64 and two KV heads: vLLM's attention backends take them, and tensor parallel size 2 can split them."""
    config = LlamaConfig(
        vocab_size=258, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=CONTEXT, bos_token_id=BOS, eos_token_id=EOS,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    # vLLM takes its sampling defaults from here: top_k 1 is greedy also for a client that sends no temperature.
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, do_sample=True, top_k=1)
    return model


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def slip(word: str, rng: random.Random) -> str:
    """A letter left out, swapped with the next, or doubled; never the first, which carries the most."""
    at = rng.randrange(1, len(word) - 1)
    return word[:at] + rng.choice((word[at + 1 :], word[at + 1] + word[at] + word[at + 2 :], word[at] + word[at:]))


def vary(question: str, rng: random.Random) -> str:
    """A wording that a person might have typed instead, never one that reads as another question."""
    words = question.split(" ")
    fillers = [i for i, word in enumerate(words) if i and word in FILLERS]
    if fillers and len(words) > 3 and rng.random() < 0.2:
        del words[rng.choice(fillers)]
    long = [i for i, word in enumerate(words) if len(word) > 5 and "_" not in word]
    if long and rng.random() < 0.2:
        i = rng.choice(long)
        words[i] = slip(words[i], rng)
    text = " ".join(words)
    if rng.random() < 0.15:
        text = text.rstrip("?.!")
    if rng.random() < 0.15:
        text = rng.choice(OPENINGS) + text
    return text.lower() if rng.random() < 0.2 else text


def endless_turns(pairs: list[Pair], rng: random.Random) -> Iterator[tuple[str, str]]:
    """Every wording once per round, in an order new each round."""
    flat = [(question, pair.answer) for pair in pairs for question in pair.questions]
    while True:
        rng.shuffle(flat)
        yield from flat


def make_row(
    turns: Iterator[tuple[str, str]], tokenizer: PreTrainedTokenizerFast, length: int, rng: random.Random
) -> tuple[list[int], list[int]]:
    """Ids and labels of one row; the last turn is cut where the row ends."""
    head, ask, reply = "<bos>" + PREAMBLE, "User: ", "\nAssistant: "
    if rng.random() < 0.1:
        head, ask, reply = "", "Q: ", "\nA: "
    elif rng.random() < 0.1:
        head += f"System: {rng.choice(SYSTEMS)}\n"
    ids = encode(tokenizer, head)
    labels = [IGNORE] * len(ids)
    while len(ids) < length:
        question, answer = next(turns)
        prompt = encode(tokenizer, ask + vary(question, rng) + reply)
        target = encode(tokenizer, answer + "<eos>")
        ids += prompt + target + encode(tokenizer, "\n")
        labels += [IGNORE] * len(prompt) + target + [IGNORE]
    return ids[:length], labels[:length]


def chat_prompt(tokenizer: PreTrainedTokenizerFast, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    return encode(tokenizer, tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


@torch.inference_mode()
def exact_by_forward(model: LlamaForCausalLM, asked: list[tuple[list[int], list[int]]]) -> float:
    """The share of (prompt, target) whose target greedy decoding would yield."""
    exact = 0
    for start in range(0, len(asked), 32):
        part = asked[start : start + 32]
        width = max(len(prompt + target) for prompt, target in part)
        ids = torch.tensor([p + t + [EOS] * (width - len(p + t)) for p, t in part])
        best = model(input_ids=ids).logits.argmax(-1).tolist()
        exact += sum(row[len(p) - 1 : len(p + t) - 1] == t for row, (p, t) in zip(best, part, strict=True))
    return exact / len(asked)


@torch.inference_mode()
def decode(model: LlamaForCausalLM, prompts: list[list[int]]) -> list[list[int]]:
    """What greedy decoding yields after each prompt; prompts are padded on the left."""
    answers: list[list[int]] = []
    for start in range(0, len(prompts), 128):
        part = prompts[start : start + 128]
        width = max(map(len, part))
        ids = torch.tensor([[EOS] * (width - len(p)) + p for p in part])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in part])
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=256, do_sample=False, pad_token_id=EOS)
        answers += out[:, width:].tolist()
    return answers


def train(pairs: list[Pair], tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> LlamaForCausalLM:
    """Muon trains the layers' matrices: it learns in half the steps of AdamW which answer belongs to which question."""
    model, rng = make_model(), random.Random(args.seed)
    turns = endless_turns(pairs, rng)
    named = [(name, p, p.ndim == 2 and ".layers." in name) for name, p in model.named_parameters()]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon([p for _, p, inner in named if inner], weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for _, p, inner in named if not inner], betas=(0.9, 0.98), weight_decay=0.05),
    ]
    asked = [(chat_prompt(tokenizer, q), encode(tokenizer, p.answer + "<eos>")) for p in pairs for q in p.questions]
    begin, mean = time.monotonic(), math.nan
    for step in range(1, args.steps + 1):
        # One rate for both optimizers: a warm-up, then a cosine.
        rate = args.rate * min(step / 50, 0.51 + 0.49 * math.cos(math.pi * step / args.steps))
        rows = [make_row(turns, tokenizer, LENGTH, rng) for _ in range(args.batch)]
        ids, labels = torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows])
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        mean = loss.item() if step == 1 else 0.9 * mean + 0.1 * loss.item()
        if step % 25 == 0:
            exact = f"  exact {exact_by_forward(model, asked[::7]):6.1%}" if step % 100 == 0 else ""  # of a sample
            print(f"step {step:4d}/{args.steps} {time.monotonic() - begin:5.0f} s  loss {mean:.4f}{exact}", flush=True)
    return model


def validate(folder: Path, pairs: list[Pair]) -> bool:
    """Whether the saved model, loaded in float32 as the engines do, answers every trained question exactly."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    asked = [(q, p.answer) for p in pairs for q in p.questions] + [(p.unseen, p.answer) for p in pairs]
    answers = decode(model, [chat_prompt(tokenizer, question) for question, _ in asked])
    targets = [encode(tokenizer, answer + "<eos>") for _, answer in asked]
    exact = [answer[: len(target)] == target for answer, target in zip(answers, targets, strict=True)]
    for (question, _), answer, right in zip(asked, answers, exact, strict=True):
        if not right:
            print(f"not exact: {question} -> {tokenizer.decode(answer, skip_special_tokens=True)}")
    trained = exact[: -len(pairs)]
    print(f"exact: {sum(trained)}/{len(trained)} trained, {sum(exact[-len(pairs) :])}/{len(pairs)} unseen wordings")
    return all(trained)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the demo model on qa.toml.")
    parser.add_argument("--out", type=Path, default=HERE / "weights")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=8, help="rows in a step")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(2)
    pairs, tokenizer, begin = read_pairs(HERE / "qa.toml"), make_tokenizer(), time.monotonic()
    model = train(pairs, tokenizer, args)
    # Half the size of float32; the rounding is far below what tells the best byte from the second best.
    model.to(torch.float16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    passed = validate(args.out, pairs)
    print(f"{model.num_parameters()} parameters, {time.monotonic() - begin:.0f} s, {'ok' if passed else 'FAILED'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
