#!/usr/bin/env python3
"""Continues a text with a model that `./run.sh --save MODEL` has written.

    python evals/generate.py MODEL ["PROMPT"] [--tokens 200] [--temperature 0.8] [--samples 1] ...
    cat FILE | python evals/generate.py MODEL -

Prints the prompt and what follows as it is drawn, until the model ends the document or there are --tokens.
Without a prompt the model begins a document. On a GPU if there is one, in plain torch either way.

Each token is drawn from the distribution that training computes after the same text, by its last windows. All
of the context is computed again for each token: the last tokens, as many as the longest document of training
has (512 in the `cpu` preset, 2,048 in `record`). Earlier ones are forgotten.

257 tokens are bytes; 50,257 are GPT-2's, from vocabulary.txt in the data's folder, or downloaded by tiktoken.
"""

import argparse
import codecs
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "data")]
import tokenize_text
import train_gpt as tg
from saved_model import load_model
from tokenize_text import number, run_script


def load(path: str) -> tuple[tg.GPT, "tokenize_text.Encoding"]:
    """Loads a saved model, onto the GPU if there is one, and its encoding.

    Raises tg.UserError if there is no tokenizer of as many tokens, or if the vocabulary in the folder of the
    model's data is another than in training.
    """
    model = load_model(path, "cuda" if torch.cuda.is_available() else "cpu")
    if model.cfg.dim < 256:
        torch.set_num_threads(1)  # with less to share, threads wait more than they work
    names, count = {257: "bytes", 50257: "gpt2"}, model.cfg.vocab_size
    if count not in names or model.cfg.bos_id != count - 1:
        raise tg.UserError(
            f"{path} has {count} tokens, and BOS is {model.cfg.bos_id}; tokenizers here have 257 or 50257, "
            "and BOS is the last"
        )
    file = ROOT / model.cfg.data / tokenize_text.VOCABULARY
    vocabulary: tuple[bytes, ...] = ()
    if names[count] == "gpt2" and file.exists():
        vocabulary = tuple(tg.read_vocabulary(file, count))
        cfg = replace(model.cfg, data=str(file.parent))
        if model.vocabulary_hash not in ("", tg.vocabulary_hash(cfg)):
            raise tg.UserError(
                f"{file} is not the vocabulary that {path} was trained with: make its data again"
            )
    return model, tokenize_text.get_encoding(names[count], vocabulary)


def max_context(cfg: tg.Config) -> int:
    """Returns the tokens of the longest document that training could see."""
    return max(min(stage.max_doc_len, stage.batch_tokens // cfg.microbatches) for stage in cfg.stages)


def choose(logits: Tensor, generator: torch.Generator, temperature=1.0, top_k=0, top_p=1.0) -> int:
    """Draws a token from logits, or log-probabilities, (V,).

    temperature: divides them; 0: the likeliest token. top_k: only of so many, the likeliest; 0: all. Of
    these, top_p: only the fewest that have together this share of their probability (nucleus sampling:
    Holtzman et al. 2019, arXiv:1904.09751).
    """
    if temperature < 1e-6:  # too near 0 to divide by
        return int(logits.argmax())
    logits, tokens = logits.double().cpu().sort(descending=True, stable=True)
    probs = (logits[: top_k or None] / temperature).softmax(0)
    probs[probs.cumsum(0) - probs >= top_p] = 0  # never the first
    return int(tokens[probs.multinomial(1, generator=generator)])


def generate(model: tg.GPT, tokens: Sequence[int], count: int, seed: int = 0, **options) -> Iterator[int]:
    """Yields at most `count` tokens after `tokens`, each as soon as it is drawn; none from BOS on.

    options: those of choose().
    """
    tokens, generator, context = list(tokens), torch.Generator().manual_seed(seed), max_context(model.cfg)
    for _ in range(count):
        token = choose(model.next_token_probs(tokens[-context:]).log(), generator, **options)
        if token == model.cfg.bos_id:
            return
        tokens.append(token)
        yield token


def make_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """Returns the parser of a script whose first argument is a model."""
    parser = tokenize_text.make_parser(prog, description)
    parser.add_argument("model", metavar="MODEL", help="the file that --save wrote")
    return parser


def run(args: argparse.Namespace) -> None:
    draws = args.top_k, args.top_p, args.seed, args.samples
    tg.require(
        args.temperature or draws == (0, 1, 0, 1),
        "--temperature 0 draws nothing; leave out --top-k, --top-p, --seed and --samples",
    )
    model, encoding = load(args.model)
    token_bytes, prompt = tokenize_text.token_bytes(encoding), args.prompt or ""
    if args.prompt_file:
        raw = args.prompt_file.read_bytes()
    else:  # an argument's bytes that are no text here are surrogates
        tg.require(prompt != "-" or sys.stdin, "standard input is closed; give the prompt as text or a file")
        raw = sys.stdin.buffer.read() if prompt == "-" else prompt.encode(errors="surrogateescape")
    with tg.user_error_on("the prompt is not UTF-8", "convert it", UnicodeDecodeError):
        prompt = raw.decode("utf-8-sig")
    tokens, context = [model.cfg.bos_id, *encoding.encode_ordinary(prompt)], max_context(model.cfg)
    if len(tokens) > context:
        print(f"of the prompt's {len(tokens)} tokens the last {context} count", file=sys.stderr)
    options = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    began, count = time.perf_counter(), 0
    ended = 0  # texts
    for sample in range(args.samples):
        if sample:
            print("-" * 80)
        print(prompt, end="", flush=True)
        text = codecs.getincrementaldecoder("utf-8")("replace")  # a character may be several tokens
        before = count
        for token in generate(model, tokens, args.tokens, args.seed + sample, **options):
            print(text.decode(token_bytes[token]), end="", flush=True)
            count += 1
        print(text.decode(b"", final=True), flush=True)
        ended += count - before < args.tokens
    seconds = time.perf_counter() - began
    print(f"{count} tokens, {count / seconds:.1f} a second", file=sys.stderr)
    if ended:
        advice = "" if count else "; give a prompt, or another --seed"
        print(
            f"the model ended {ended} of {args.samples} texts early, by its own choice{advice}",
            file=sys.stderr,
        )


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("generate.py", __doc__)
    prompt, add = parser.add_mutually_exclusive_group(), parser.add_argument
    prompt.add_argument("prompt", nargs="?", metavar="PROMPT", help="text to continue; -: standard input")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="take the prompt from a file")
    add("--tokens", type=number(int, 1), default=200, help="at most so many (default: %(default)s)")
    add("--temperature", type=number(float, 0), default=0.8, help="0: the likeliest (default: %(default)s)")
    add("--top-k", type=number(int, 0), default=0, help="draw from the K likeliest tokens; 0: from all")
    add("--top-p", type=number(float, 1e-9, 1), default=1.0, help="and of these, from that share")
    add("--seed", type=number(int, 0), default=0, help="of the first sample; of others 1, 2, ... more")
    add("--samples", type=number(int, 1), default=1, help="how often (default: %(default)s)")
    run_script(run, parser, argv, tg.UserError)


if __name__ == "__main__":
    main()
