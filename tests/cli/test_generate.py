"""The generate and serve commands on a fake engine, and how faults are told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from typer.testing import CliRunner, Result

from v4graph.cli.main import app
from v4graph.engine.request import FinishReason, SamplingParams, StepOutput, TokenLogprobs
from v4graph.errors import RequestError, SpecError
from v4graph.spec import load as loader

EOS = "<eos>"
ANSWER = "the quick brown fox"


@dataclass
class FakeEngine:
    """Answers with `ANSWER` and an EOS, one token a step, whatever the prompt."""

    answer: list[int]
    config: Any
    max_model_len: int = 64
    spec: Any = field(default_factory=lambda: SimpleNamespace(bos_token_id=None, name="fake"))
    running: dict[str, tuple[SamplingParams, int]] = field(default_factory=dict)
    faulty: ClassVar[str | None] = None
    """A request whose logits are not finite behind its first token."""
    prompts: list[list[int]] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)

    def add_request(self, request_id: str, prompt_ids: list[int], params: SamplingParams) -> None:
        self.prompts.append(prompt_ids)
        self.params.append(params)
        self.running[request_id] = (params, 0)

    def abort(self, request_id: str) -> None:
        self.running.pop(request_id, None)

    def has_unfinished(self) -> bool:
        return bool(self.running)

    def step(self) -> list[StepOutput]:
        outputs = []
        for request_id, (params, count) in list(self.running.items()):
            token_id = self.answer[count]
            finish = None
            if count + 1 == len(self.answer):
                finish = FinishReason.STOP
            elif count + 1 == params.max_tokens:
                finish = FinishReason.LENGTH
            if request_id == self.faulty:
                finish = FinishReason.ERROR
            self.running[request_id] = (params, count + 1)
            if finish is not None:
                del self.running[request_id]
            told = None
            if params.logprobs is not None:
                top = [(token_id, float("-inf"))] * params.logprobs
                told = [TokenLogprobs(token_id, -0.5, top)]
            outputs.append(StepOutput(request_id, [token_id], finish, told))
        return outputs


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 20, trainer)
    directory = tmp_path_factory.mktemp("weights")
    backend.save(str(directory / "tokenizer.json"))
    return directory


Generate = Callable[..., Result]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, weights: Path) -> list[FakeEngine]:
    """The engines that commands start; the engine and the spec loader are fakes."""
    started: list[FakeEngine] = []
    backend = Backend.from_file(str(weights / "tokenizer.json"))

    class LLMEngine:
        @classmethod
        def from_spec(cls, spec: Any, weights: Path, config: Any, progress: Any) -> FakeEngine:
            for stage in ("load", "compile"):
                for done in range(3):
                    progress(stage, done, 2)
            answer = [*backend.encode(ANSWER).ids, backend.token_to_id(EOS)]
            started.append(FakeEngine(answer, config))
            return started[-1]

    module = ModuleType("v4graph.engine.engine")
    module.__dict__.update(LLMEngine=LLMEngine, EngineConfig=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "v4graph.engine.engine", module)
    monkeypatch.setattr(loader, "load_spec", lambda name: SimpleNamespace(name=name))
    return started


@pytest.fixture
def generate(engines: list[FakeEngine], weights: Path) -> Generate:
    def run(*args: str) -> Result:
        return CliRunner().invoke(app, ["generate", "any", "--weights", str(weights), *args])

    return run


def test_text_on_stdout_figures_on_stderr(generate: Generate) -> None:
    result = generate("--prompt", "the")
    assert result.exit_code == 0, result.output
    assert result.stdout == ANSWER + "\n"
    first, last, figures = result.stderr.splitlines()
    assert first.startswith("loading and compiling")
    assert last.startswith("loaded and compiled after")
    assert figures.startswith("1 prompt tokens | 5 generated | ")
    for part in ("tokens/s", "first token", "load", "compile"):
        assert part in result.stderr


def test_text_is_written_while_it_is_generated(
    generate: Generate, engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[tuple[str, int]] = []
    monkeypatch.setattr(
        "v4graph.cli.generate.sys",
        SimpleNamespace(
            stdout=SimpleNamespace(
                write=lambda text: pieces.append((text, len(engines[0].running))),
                flush=lambda: None,
            )
        ),
    )
    assert generate("--prompt", "the").exit_code == 0
    assert ("the", 1) in pieces
    assert "".join(text for text, _ in pieces) == ANSWER + "\n"


def test_batch_prints_prompts_in_order(generate: Generate) -> None:
    result = generate("--prompt", "a", "--prompt", "b")
    assert result.stdout == (
        f"==> prompt 1 of 2 <==\n{ANSWER}\n\n==> prompt 2 of 2 <==\n{ANSWER}\n"
    )


def test_json(generate: Generate, engines: list[FakeEngine]) -> None:
    result = generate("--prompt", "the", "--json", "--stop", "brown")
    assert result.stderr == ""
    body = json.loads(result.stdout)
    assert body["text"] == "the quick "
    assert body["token_ids"] == engines[0].answer[:3]
    assert body["finish_reason"] == "stop"
    assert body["usage"] == {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
    assert set(body["timings"]) == {
        "load_s",
        "compile_s",
        "time_to_first_token_s",
        "generate_s",
        "tokens_per_s",
    }


def test_json_of_a_batch(generate: Generate) -> None:
    body = json.loads(generate("--prompt", "a", "--prompt", "b", "--json").stdout)
    assert [output["text"] for output in body["outputs"]] == [ANSWER] * 2
    assert body["usage"]["completion_tokens"] == 10


def test_prompt_ids_give_ids(
    generate: Generate, engines: list[FakeEngine], weights: Path, tmp_path: Path
) -> None:
    # The later --weights counts: a directory without a tokenizer.
    result = generate("--prompt-ids", "5,6", "--weights", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert engines[0].prompts == [[5, 6]]
    assert result.stdout == ",".join(map(str, engines[0].answer)) + "\n"
    body = json.loads(generate("--prompt-ids", "5,6", "--json", "--max-tokens", "2").stdout)
    assert "text" not in body
    assert body["token_ids"] == engines[1].answer[:2]
    assert body["finish_reason"] == "length"


def test_options_reach_the_engine(generate: Generate, engines: list[FakeEngine]) -> None:
    options = ["--max-num-seqs", "3", "--no-compile", "--checked", "--dtype", "bfloat16"]
    options += ["--speculative", "mtp", "--num-draft-tokens", "2", "--no-overlap"]
    options += ["--kv-memory", "3MiB", "--no-prefix-cache"]
    assert generate("--prompt", "a", *options, "--device", "cpu").exit_code == 0
    config = vars(engines[0].config)
    assert config == {
        "max_model_len": None,
        "max_num_seqs": 3,
        "dtype": "bfloat16",
        "device": "cpu",
        "compile": False,
        "checked": True,
        "kernels": "auto",
        "weight_format": "auto",
        "allow_nonfinite": False,
        "speculative": "mtp",
        "num_draft_tokens": 2,
        "overlap": False,
        "prefix_cache": False,
        "kv_memory_bytes": 3 * 2**20,
        "max_num_batched_tokens": 128,
        "prefill_buckets": ((128, 3),),
        "decode_buckets": (3,),
        "greedy_only": True,
        "logits_processing": False,
        "max_logprobs": 0,
    }


def test_rules_reach_the_engine(generate: Generate, engines: list[FakeEngine]) -> None:
    """And the engine is built for them, and for them only."""
    options = ["--repetition-penalty", "1.2", "--presence-penalty", "0.5", "--frequency-penalty"]
    options += ["-0.5", "--logit-bias", "7=-100", "--logit-bias", "8=1.5", "--min-tokens", "3"]
    options += ["--bad-words", "lazy dog", "--min-p", "0.1", "--logprobs", "2", "--json"]
    assert generate("--prompt", "a", *options).exit_code == 0
    (params,) = engines[0].params
    assert (params.repetition_penalty, params.presence_penalty) == (1.2, 0.5)
    assert (params.frequency_penalty, params.min_tokens, params.min_p) == (-0.5, 3, 0.1)
    assert params.logit_bias == {7: -100.0, 8: 1.5}
    assert len(params.bad_words) == 2  # at the start of a text, and later
    assert params.logprobs == 2
    config = engines[0].config
    assert (config.logits_processing, config.max_logprobs) == (True, 2)
    assert generate("--prompt", "a", "--logprobs", "0", "--json").exit_code == 0
    config = engines[1].config
    assert (config.logits_processing, config.max_logprobs) == (False, 1)


def test_logprobs_in_json(generate: Generate, engines: list[FakeEngine]) -> None:
    """One entry a token: those behind a stop string are left out."""
    result = generate("--prompt", "the", "--json", "--logprobs", "1", "--stop", "brown")
    body = json.loads(result.stdout)
    told = body["logprobs"]
    assert [entry["token_id"] for entry in told] == body["token_ids"] == engines[0].answer[:3]
    assert [entry["token"] for entry in told] == ["the", " quick", " brown"]
    first = told[0]["token_id"]
    assert told[0]["logprob"] == -0.5
    assert told[0]["top"] == [{"token_id": first, "token": "the", "logprob": None}]
    bare = json.loads(generate("--prompt-ids", "5", "--json", "--logprobs", "0").stdout)
    assert [set(entry) for entry in bare["logprobs"]] == [{"token_id", "logprob", "top"}] * 5
    assert "logprobs" not in json.loads(generate("--prompt", "the", "--json").stdout)


def test_stop_strings_wait_for_min_tokens(generate: Generate) -> None:
    """`brown` is the third token."""
    options = ["--prompt", "the", "--stop", "brown", "--min-tokens"]
    assert generate(*options, "2").stdout == "the quick \n"
    assert generate(*options, "3").stdout == ANSWER + "\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "give --prompt or --prompt-ids"),
        (["--prompt", "a", "--prompt-ids", "1"], "give --prompt or --prompt-ids"),
        (["--prompt-ids", "1,x"], "expected numbers like 1,2,3"),
        (["--prompt-ids", "1", "--stop", "x"], "--stop needs text"),
        (["--prompt", "a", "--stop", ""], "must not be empty"),
        (["--prompt-ids", "1", "--bad-words", "x"], "--bad-words needs text"),
        (["--prompt", "a", "--bad-words", ""], "must not be empty"),
        (["--prompt", "a", "--logprobs", "2"], "--logprobs needs --json"),
        (["--prompt", "a", "--logit-bias", "5"], "expected ID=BIAS"),
        (["--prompt", "a", "--logit-bias", "5=1", "--logit-bias", "5=2"], "twice"),
        (["--prompt", "the " * 100], "leave no room"),
        (["--prompt", "a", "--weights", "/nowhere"], "no such checkpoint directory"),
    ],
)
def test_faults_are_one_message_and_status_2(
    generate: Generate, args: list[str], message: str
) -> None:
    result = generate(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    # What only the engine's length tells comes after its start.
    told = [line for line in result.stderr.splitlines() if not line.startswith("load")]
    assert len(told) == 1
    assert told[0].startswith("error: ")
    assert message in told[0]


@pytest.mark.parametrize(
    "option",
    [
        ["--temperature", "-1"],
        ["--top-p", "0"],
        ["--top-k", "-1"],
        ["--min-p", "2"],
        ["--repetition-penalty", "0"],
        ["--presence-penalty", "3"],
        ["--frequency-penalty", "-3"],
        ["--logit-bias", "5=101"],
        ["--min-tokens", "129"],
        ["--logprobs", "21", "--json"],
    ],
)
def test_sampling_faults_come_before_loading(
    generate: Generate, engines: list[FakeEngine], option: list[str]
) -> None:
    result = generate("--prompt", "a", *option)
    assert result.exit_code == 2
    assert option[0].strip("-").replace("-", "_") in result.stderr
    assert engines == []


def test_traceback_anywhere(generate: Generate) -> None:
    result = generate("--traceback")
    assert isinstance(result.exception, RequestError)


def test_spec_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_spec(name: str) -> None:
        raise SpecError(f"{name}: line 3: no such kind")

    monkeypatch.setattr(loader, "load_spec", load_spec)
    result = CliRunner().invoke(app, ["generate", "bad", "--prompt", "a"])
    assert (result.exit_code, result.stderr) == (2, "error: bad: line 3: no such kind\n")


def test_help_and_version_need_no_torch() -> None:
    """What makes them slow is heavy imports; a clock would measure the machine's load."""
    code = (
        "import sys\n"
        "from v4graph.cli.main import app\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "assert not {'torch', 'fastapi', 'tokenizers'} & set(sys.modules), 'heavy import'\n"
    )
    for args in (["--help"], ["--version"], ["version"], ["generate", "--help"]):
        run = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert run.stdout


def test_schema() -> None:
    result = CliRunner().invoke(app, ["schema"])
    assert "ModelSpec" in json.loads(result.stdout)["title"]


def test_serve_py_is_the_serve_command() -> None:
    root = Path(__file__).parents[2]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
        "COLUMNS": "200",
    }
    run = subprocess.run(
        [sys.executable, str(root / "serve.py"), "--help"], capture_output=True, text=True, env=env
    )
    assert run.returncode == 0
    assert "--served-model-name" in run.stdout


def test_logits_that_are_not_finite_fail_once_the_others_are_done(
    generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "faulty", "1")
    result = generate("--prompt", "the", "--prompt", "fox", "--json")
    assert result.exit_code == 2
    outputs = json.loads(result.stdout)["outputs"]
    assert [o["finish_reason"] for o in outputs] == ["stop", "error"]
    assert outputs[0]["text"] == ANSWER
    assert "NaN or infinite after 1 generated token:" in result.stderr
    assert "prompt 2 of 2" in result.stderr
