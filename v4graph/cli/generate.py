"""`v4graph generate`: run prompts through a model and print what it writes."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from v4graph.cli.options import (
    AllowNonfiniteOption,
    CheckedOption,
    CompileOption,
    DeviceOption,
    DtypeOption,
    KernelsOption,
    KvMemoryOption,
    MaxModelLenOption,
    NumDraftTokensOption,
    OverlapOption,
    PrefixCacheOption,
    SpecArgument,
    SpeculativeOption,
    StageTimes,
    WeightFormatOption,
    WeightsOption,
    build_engine,
    load_tokenizer,
    num_bytes,
)
from v4graph.cli.sampling import (
    BadWordsOption,
    FrequencyOption,
    LogitBiasOption,
    LogprobsOption,
    MinPOption,
    MinTokensOption,
    PresenceOption,
    RepetitionOption,
    SeedOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    parse_logit_bias,
    told,
)
from v4graph.errors import NonFiniteLogitsError, RequestError
from v4graph.words import counted

if TYPE_CHECKING:
    from v4graph.engine.engine import LLMEngine
    from v4graph.engine.request import StepOutput, TokenLogprobs
    from v4graph.text.output import OutputText
    from v4graph.text.tokenizer import Tokenizer


PREFILL_TOKENS = 128
"""Tokens of a prefill step."""


def generate(
    spec: SpecArgument,
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A prompt; repeat for a batch.")
    ] = None,
    prompt_ids: Annotated[
        list[str] | None,
        typer.Option(metavar="1,2,3", help="A prompt as token ids; the output is ids too."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Cap on generated tokens; the context caps them too.")
    ] = 128,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    min_p: MinPOption = 0.0,
    repetition_penalty: RepetitionOption = 1.0,
    presence_penalty: PresenceOption = 0.0,
    frequency_penalty: FrequencyOption = 0.0,
    logit_bias: LogitBiasOption = None,
    bad_words: BadWordsOption = None,
    min_tokens: MinTokensOption = 0,
    logprobs: LogprobsOption = None,
    seed: SeedOption = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Text that ends it; repeatable.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past an EOS.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    weights: WeightsOption = None,
    max_model_len: MaxModelLenOption = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Prompts that run at once; all, up to 8.")
    ] = None,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "auto",
    compiled: CompileOption = True,
    checked: CheckedOption = False,
    kernels: KernelsOption = "auto",
    weight_format: WeightFormatOption = "auto",
    allow_nonfinite: AllowNonfiniteOption = False,
    speculative: SpeculativeOption = None,
    num_draft_tokens: NumDraftTokensOption = None,
    overlap: OverlapOption = True,
    prefix_cache: PrefixCacheOption = True,
    kv_memory: KvMemoryOption = None,
) -> None:
    """Continue prompts: text on stdout as it is written, figures on stderr."""
    from v4graph.engine.request import SamplingParams

    texts = {"--stop": stop or [], "--bad-words": bad_words or []}
    wanted = _check_prompts(prompt or [], prompt_ids or [], texts)
    if logprobs is not None and not as_json:
        raise RequestError("--logprobs needs --json", "logprobs")
    # Wrong values are told before minutes of loading.
    sampling: dict[str, Any] = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": parse_logit_bias(logit_bias or []),
        "min_tokens": min_tokens,
        "logprobs": logprobs,
        "seed": seed,
        "ignore_eos": ignore_eos,
    }
    if bad_words:
        sampling["bad_words"] = load_tokenizer(spec, weights, None).banned_sequences(bad_words)
    asked = SamplingParams(max_tokens=max_tokens, **sampling)
    seqs = max_num_seqs or min(len(wanted), 8)
    config = {
        "max_model_len": max_model_len,
        "max_num_seqs": seqs,
        "dtype": dtype,
        "device": device,
        "compile": compiled,
        "checked": checked,
        "kernels": kernels,
        "weight_format": weight_format,
        "allow_nonfinite": allow_nonfinite,
        "speculative": speculative,
        "num_draft_tokens": num_draft_tokens,
        "overlap": overlap,
        "prefix_cache": prefix_cache,
        "kv_memory_bytes": num_bytes("--kv-memory", kv_memory) or None,
    }
    # One program a mode: all prompts are known, so no other batch size will come.
    config |= {
        "max_num_batched_tokens": PREFILL_TOKENS,
        "prefill_buckets": ((PREFILL_TOKENS, seqs),),
        "decode_buckets": (seqs,),
        "greedy_only": temperature == 0,
        "logits_processing": bool(asked.rule_fields),
        "max_logprobs": 0 if logprobs is None else max(logprobs, 1),
    }
    engine, stages = build_engine(spec, weights, config, quiet=as_json)
    tokenizer = None
    if prompt:
        tokenizer = load_tokenizer(spec, weights, engine.spec.bos_token_id)
    run = Run(engine, tokenizer, stop or [], min_tokens, stream=not as_json)
    for item in wanted:
        ids = item if isinstance(item, list) else _encode(tokenizer, item)
        room = engine.max_model_len - len(ids)
        if room < 1:
            raise RequestError(
                f"--prompt: {counted(len(ids), 'token leaves', 'tokens leave')} no room for "
                f"output; the context has {counted(engine.max_model_len, 'token')} "
                "(--max-model-len)",
                "prompt",
            )
        cap = min(max_tokens, room)
        sampling["min_tokens"] = min(min_tokens, cap)
        run.add(ids, SamplingParams(max_tokens=cap, **sampling))
    run.finish()
    if as_json:
        typer.echo(json.dumps(run.report(stages), ensure_ascii=False))
    else:
        typer.echo(run.summary(stages), err=True)
    run.check()


def _check_prompts(
    texts: list[str], ids: list[str], need_text: dict[str, list[str]]
) -> list[str | list[int]]:
    if bool(texts) == bool(ids):
        raise RequestError("give --prompt or --prompt-ids (and not both)", "prompt")
    for option, values in need_text.items():
        if ids and values:
            raise RequestError(f"{option} needs text; it cannot go with --prompt-ids", option)
        if not all(values):
            raise RequestError(f"{option}: a text must not be empty", option)
    try:
        return [*texts, *([int(i) for i in item.split(",")] for item in ids)]
    except ValueError as error:
        raise RequestError(
            f"--prompt-ids: expected numbers like 1,2,3, got {' '.join(ids)!r}", "prompt_ids"
        ) from error


def _encode(tokenizer: Tokenizer | None, text: str) -> list[int]:
    assert tokenizer is not None  # noqa: S101 (text prompts always come with a tokenizer)
    return tokenizer.encode(text, add_bos=True)


@dataclass
class Output:
    """What one prompt has brought so far."""

    num_prompt_tokens: int
    text: OutputText | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of these tokens, if they were asked for."""
    pieces: list[str] = field(default_factory=list)
    num_printed: int = 0
    finish_reason: str | None = None


class Run:
    """A batch of prompts on an engine; prints as it goes, prompts in their order."""

    def __init__(
        self,
        engine: LLMEngine,
        tokenizer: Tokenizer | None,
        stops: list[str],
        min_tokens: int,
        stream: bool,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._stops, self._min_tokens = stops, min_tokens
        self._stream = stream
        self._outputs: list[Output] = []
        self._num_done = 0
        self._start = self._first = self._end = 0.0

    def add(self, prompt_ids: list[int], params: Any) -> None:
        """Add a prompt; its request id is its number."""
        from v4graph.text.output import OutputText

        text = None
        if self._tokenizer is not None:
            text = OutputText(self._tokenizer, self._stops, min_tokens=self._min_tokens)
        self._engine.add_request(str(len(self._outputs)), prompt_ids, params)
        self._outputs.append(Output(len(prompt_ids), text))

    def finish(self) -> None:
        """Step until every prompt has ended."""
        self._start = time.perf_counter()
        while self._engine.has_unfinished():
            for step in self._engine.step():
                if step.token_ids and not self._first:
                    self._first = time.perf_counter()
                self._take(step)
            self._print()
        self._end = time.perf_counter()

    def _take(self, step: StepOutput) -> None:
        output = self._outputs[int(step.request_id)]
        self._take_tokens(step, output)
        output.logprobs = [*output.logprobs, *(step.logprobs or [])][: len(output.token_ids)]

    def _take_tokens(self, step: StepOutput, output: Output) -> None:
        reason = None if step.finish_reason is None else step.finish_reason.value
        if output.text is None:
            output.token_ids += step.token_ids
            start = len(output.token_ids) - len(step.token_ids)
            output.pieces += [
                f"{',' if start + n else ''}{token_id}" for n, token_id in enumerate(step.token_ids)
            ]
            output.finish_reason = reason
            return
        # The token that ended the text has no text of its own.
        ids = step.token_ids[:-1] if reason == "stop" else step.token_ids
        delta = output.text.push(ids)
        output.pieces.append(delta.text)
        if delta.stopped:
            output.token_ids += ids[: delta.num_tokens]
            output.finish_reason = "stop"
            if reason is None:
                self._engine.abort(step.request_id)
            return
        output.token_ids += step.token_ids
        if reason is not None:
            output.pieces.append(output.text.flush().text)
            output.finish_reason = reason

    def _print(self) -> None:
        if not self._stream:
            return
        while self._num_done < len(self._outputs):
            output = self._outputs[self._num_done]
            if output.num_printed == 0 and len(self._outputs) > 1:
                between = "\n" if self._num_done else ""
                head = f"{between}==> prompt {self._num_done + 1} of {len(self._outputs)} <==\n"
                output.pieces.insert(0, head)
            sys.stdout.write("".join(output.pieces[output.num_printed :]))
            output.num_printed = len(output.pieces)
            if output.finish_reason is None:
                break
            sys.stdout.write("\n")
            self._num_done += 1
        sys.stdout.flush()

    def check(self) -> None:
        """After everything was printed.

        Raises:
            NonFiniteLogitsError: a prompt's logits became NaN or infinite.
        """
        failed = [i for i, output in enumerate(self._outputs) if output.finish_reason == "error"]
        if failed:
            count = len(self._outputs)
            which = f" (prompt {', '.join(str(i + 1) for i in failed)} of {count})"
            error = NonFiniteLogitsError.after(len(self._outputs[failed[0]].token_ids))
            raise NonFiniteLogitsError(f"{error}{which if count > 1 else ''}")

    def _totals(self) -> tuple[int, int]:
        prompt = sum(output.num_prompt_tokens for output in self._outputs)
        return prompt, sum(len(output.token_ids) for output in self._outputs)

    def report(self, stages: StageTimes) -> dict[str, Any]:
        """One JSON object: flat for one prompt, with `outputs` for several."""
        outputs = []
        for output in self._outputs:
            item: dict[str, Any] = {} if output.text is None else {"text": "".join(output.pieces)}
            item |= {"token_ids": output.token_ids, "finish_reason": output.finish_reason}
            if output.logprobs:
                item["logprobs"] = told(output.logprobs, self._tokenizer)
            outputs.append(item)
        prompt, generated = self._totals()
        seconds = self._end - self._start
        body: dict[str, Any] = outputs[0] if len(outputs) == 1 else {"outputs": outputs}
        return body | {
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": generated,
                "total_tokens": prompt + generated,
            },
            "timings": {
                **{f"{stage}_s": round(value, 4) for stage, value in stages.seconds.items()},
                "time_to_first_token_s": round(self._first - self._start, 4),
                "generate_s": round(seconds, 4),
                "tokens_per_s": round(generated / seconds, 2),
            },
        }

    def summary(self, stages: StageTimes) -> str:
        """One line for a person."""
        prompt, generated = self._totals()
        seconds = self._end - self._start
        parts = [
            f"{prompt} prompt tokens",
            f"{generated} generated",
            f"{generated / seconds:.1f} tokens/s",
            f"first token {self._first - self._start:.2f} s",
            *(f"{stage} {value:.1f} s" for stage, value in stages.seconds.items()),
        ]
        return " | ".join(parts)
