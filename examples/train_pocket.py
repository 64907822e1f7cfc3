"""Train the bundled pocket model: a small nanochat on the text that every Python carries.

    python examples/train_pocket.py --out pocket_model --checkpoints checkpoints

The corpus is the help topics of `pydoc`, the standard library's docstrings and its source. The
architecture is the one of the post that this package follows (rotary, QK-norm, relu squared,
RMSNorm without weights, a norm right after the embedding, untied head), and so is the optimiser
split: Muon for the matrices of the blocks, AdamW for embedding and head. Two runs on the same
Python, the same torch and as many threads give the same weights; see the model card for those of
the bundled model. Needs `torch>=2.9` (for Muon), `transformers>=5` and `tokenizers`. Where other
work shares the cores, OMP_WAIT_POLICY=PASSIVE in the environment keeps the threads from spinning.
"""

import argparse
import ast
import hashlib
import importlib
import inspect
import json
import logging
import math
import platform
import sys
import sysconfig
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import NanoChatConfig, NanoChatForCausalLM, PreTrainedTokenizerFast

log = logging.getLogger("train_pocket")

BOS = "<|bos|>"
VOCAB = 1280
CONTEXT = 384
BATCH = 8
STEPS = 2000
MUON_LR, ADAM_LR = 0.02, 0.004
WARMUP, DECAY = 0.03, 0.5  # shares of the run spent rising and falling
HELD_OUT = 0.03
# Tests repeat the code they test, code pages are tables of numbers, and the two underscored names
# hold the paths of one machine or the help topics over again.
SKIP = {"test", "tests", "idle_test", "site-packages", "encodings", "ensurepip", "pydoc_data"}
SKIP_PREFIX = ("_sysconfigdata", "sitecustomize", "usercustomize")


class Document(NamedTuple):
    kind: str  # "topic", "docstring" or "source"
    name: str  # what the split is drawn by
    text: str


def _docstrings_in(source: str) -> list[str]:
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(n) for n in ast.walk(ast.parse(source)) if isinstance(n, nodes))
    return [text for text in found if text]


def _docstrings_of_builtin(name: str) -> list[str]:
    # C modules have no source: their docstrings are read off the imported objects.
    module = importlib.import_module(name)
    objects = [module]
    for _, value in sorted(vars(module).items()):
        objects.append(value)
        if inspect.isclass(value):
            objects.extend(member for _, member in sorted(vars(value).items()))
    texts = (inspect.getdoc(o) for o in objects if inspect.isroutine(o) or inspect.isclass(o))
    return list(dict.fromkeys(text for text in texts if text and len(text) > 80))


def read_corpus() -> list[Document]:
    """Every document, in an order that depends on the Python version alone."""
    documents = [Document("topic", name, text) for name, text in sorted(topics.topics.items())]
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        if SKIP & set(place.parts) or place.name.startswith(SKIP_PREFIX):
            continue
        source = path.read_text(encoding="utf-8", errors="ignore")
        name = place.with_suffix("").as_posix()
        documents.append(Document("source", name, source))
        documents.append(Document("docstring", name, "\n\n".join(_docstrings_in(source))))
    for name in sorted(sys.builtin_module_names):
        documents.append(Document("docstring", name, "\n\n".join(_docstrings_of_builtin(name))))
    return [d for d in documents if len(d.text) > 200]


def is_held_out(document: Document) -> bool:
    """Split by file. `_io`, `io` and `_pyio` share their texts, so they stay on one side."""
    name = document.name.removesuffix("/__init__")
    family = "/".join(part.strip("_").removeprefix("py") for part in name.split("/"))
    digest = hashlib.sha256(family.encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32 < HELD_OUT


def train_tokenizer(documents: list[Document]) -> PreTrainedTokenizerFast:
    """Byte-level BPE: no text is unknown to it. A text starts with the BOS token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[BOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator((d.text for d in documents), trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=BOS,
        pad_token=BOS,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, documents: list[Document]) -> list[list[int]]:
    """Ids of each document, without BOS."""
    texts = [d.text for d in documents]
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def new_model() -> NanoChatForCausalLM:
    return NanoChatForCausalLM(
        NanoChatConfig(
            vocab_size=VOCAB,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=8,
            num_attention_heads=4,
            max_position_embeddings=1024,
            initializer_range=0.04,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
            # A padding id would freeze that token's embedding at zero.
            pad_token_id=None,
        )
    )


def token_losses(model: NanoChatForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """Cross entropy in nats of every token after the first; [batch, pos - 1]."""
    logits = model(input_ids=rows[:, :-1]).logits.float()
    return torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), rows[:, 1:].long(), reduction="none"
    )


def training_rows(ids: list[list[int]], seed: int) -> Iterator[torch.Tensor]:
    """Endless batches [batch, CONTEXT + 1]: shuffled cuts of the joined text, each behind a BOS."""
    joined = torch.tensor([t for document in ids for t in (0, *document)], dtype=torch.int32)
    generator = torch.Generator().manual_seed(seed)
    while True:
        # Another offset each pass, so that no pass sees the same cuts.
        offset = int(torch.randint(CONTEXT, (1,), generator=generator))
        count = (len(joined) - offset) // CONTEXT
        rows = joined[offset : offset + count * CONTEXT].view(count, CONTEXT)
        rows = torch.cat([torch.zeros(count, 1, dtype=torch.int32), rows], dim=1)
        for chosen in torch.randperm(count, generator=generator).split(BATCH):
            if len(chosen) == BATCH:
                yield rows[chosen].long()


@torch.no_grad()
def model_bits(model: NanoChatForCausalLM, ids: list[list[int]], n_bytes: int) -> float:
    """Bits per byte. Every token of every document is predicted once, from its own cut alone."""
    cuts = [[0, *d[i : i + CONTEXT]] for d in ids for i in range(0, len(d), CONTEXT)]
    cuts.sort(key=len)
    nats = 0.0
    for i in range(0, len(cuts), 16):
        chunk = cuts[i : i + 16]
        width = max(map(len, chunk))
        rows = torch.tensor([row + [0] * (width - len(row)) for row in chunk])
        keep = torch.tensor([[j < len(row) for j in range(1, width)] for row in chunk])
        nats += token_losses(model, rows)[keep].double().sum().item()
    return nats / math.log(2) / n_bytes


def bigram_bits(train: list[list[int]], ids: list[list[int]], n_bytes: int) -> float:
    """Bits per byte of a token bigram, smoothed (Witten-Bell) towards an add-one unigram.

    It sees the true previous token everywhere, also where the model starts a new cut.
    """
    single: Counter[int] = Counter()
    pair: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for document in train:
        single.update(document)
        for before, after in zip([0, *document], document, strict=False):
            pair[before][after] += 1
    total, nats = sum(single.values()), 0.0
    count = {before: sum(after.values()) for before, after in pair.items()}
    for document in ids:
        for before, after in zip([0, *document], document, strict=False):
            unigram = (single[after] + 1) / (total + VOCAB)
            kinds = len(pair[before]) or 1
            seen = pair[before][after]
            nats -= math.log((seen + kinds * unigram) / (count.get(before, 0) + kinds))
    return nats / math.log(2) / n_bytes


def save(
    model: NanoChatForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path, record: dict
) -> None:
    """A Hugging Face folder in half precision, with the run's figures beside it."""
    half = new_model()
    half.load_state_dict(model.state_dict())
    half.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = (folder / "model.safetensors").read_bytes()
    record = {**record, "sha256": hashlib.sha256(weights).hexdigest()}
    (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n")


def rate(step: int, steps: int) -> float:
    """Share of the peak learning rate: a linear rise, a plateau, a linear fall to zero."""
    return min(1.0, (step + 1) / (WARMUP * steps), (steps - step) / (DECAY * steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("pocket_model"), help="folder to write")
    parser.add_argument("--checkpoints", type=Path, help="folder for checkpoints along the way")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(options.seed)

    corpus = read_corpus()
    train = [d for d in corpus if not is_held_out(d)]
    held = [d for d in corpus if is_held_out(d)]
    tokenizer = train_tokenizer(train)
    train_ids, held_ids = encode(tokenizer, train), encode(tokenizer, held)
    held_bytes = sum(len(d.text.encode()) for d in held)
    record = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seed": options.seed,
        "threads": options.threads,
        "steps": options.steps,
        "tokens_per_step": BATCH * CONTEXT,
        "train_documents": len(train),
        "train_bytes": sum(len(d.text.encode()) for d in train),
        "train_tokens": sum(map(len, train_ids)),
        "held_out_documents": len(held),
        "held_out_bytes": held_bytes,
        "held_out_tokens": sum(map(len, held_ids)),
        "bigram_bits_per_byte": bigram_bits(train_ids, held_ids, held_bytes),
    }
    log.info("%s", json.dumps(record))

    model = new_model()
    body = list(model.model.layers.parameters())
    ends = [model.model.embed_tokens.weight, model.lm_head.weight]
    optimizers = [
        torch.optim.Muon(body, lr=MUON_LR, weight_decay=0.01),
        torch.optim.AdamW(ends, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.01),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: rate(step, options.steps))
        for o in optimizers
    ]
    milestones = {0, options.steps} | {2**i for i in range(3, options.steps.bit_length())}
    batches = training_rows(train_ids, options.seed)
    started, recent = time.monotonic(), []
    for step in range(options.steps + 1):
        if options.checkpoints and step in milestones:
            folder = options.checkpoints / f"step_{step:06d}"
            bits = model_bits(model, held_ids, held_bytes)
            save(model, tokenizer, folder, {**record, "step": step, "held_out_bits_per_byte": bits})
            log.info("step %d: %.4f held-out bits per byte, saved %s", step, bits, folder)
        if step == options.steps:
            break
        loss = token_losses(model, next(batches)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        recent.append(loss.item())
        if (step + 1) % 50 == 0:
            speed = (step + 1) * BATCH * CONTEXT / (time.monotonic() - started)
            log.info("step %d: loss %.4f, %.0f tokens/s", step + 1, sum(recent) / 50, speed)
            recent.clear()

    for kind in ("topic", "docstring", "source"):
        some = [i for i, d in enumerate(held) if d.kind == kind]
        size = sum(len(held[i].text.encode()) for i in some)
        key = f"held_out_bits_per_byte_{kind}"
        record[key] = model_bits(model, [held_ids[i] for i in some], size) if size else math.nan
    record["held_out_bits_per_byte"] = model_bits(model, held_ids, held_bytes)
    save(model, tokenizer, options.out, record)
    log.info("%s", (options.out / "training.json").read_text())


if __name__ == "__main__":
    main()
