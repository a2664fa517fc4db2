"""Mixtures: exact shares in any stretch, a verifier for each row, and what does not fit is refused."""

from __future__ import annotations

import asyncio
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.commands import tiny_run, write_rows
from support.environments import run
from support.tiny import groups, write_model

from megarl.data.order import Interleaving, Order
from megarl.data.source import PromptList, load_prompts
from megarl.data.tokenizer import load_tokenizer
from megarl.environments.scoring import Environment
from megarl.environments.trial import LEAST_ROWS, rows_to_try
from megarl.rollout.batch import describe
from megarl.rollout.evaluation import summarise_records
from megarl.run.evaluate import over_samples
from megarl.run.plan import check_eval, plan_run
from megarl.settings import config as recipes
from megarl.settings.config import RunConfig
from megarl.settings.data import PromptsConfig, PromptSourceConfig, exact
from megarl.settings.environments import EnvironmentConfig
from megarl.settings.schema import replace
from megarl.settings.verifiers import NamedVerifierConfig
from megarl.types import Prompt, Verdict

weights = st.lists(st.integers(1, 10**6), min_size=1, max_size=6).map(
    lambda parts: [Fraction(part, sum(parts)) for part in parts]
)


@settings(max_examples=150, deadline=None)
@given(weights, st.integers(0, 10**12), st.integers(0, 300))
@example([Fraction(7, 10), Fraction(3, 10)], 0, 300)
def test_shares_are_exact_in_every_stretch(shares: list[Fraction], start: int, length: int) -> None:
    """Counts of the first n positions, known from the next position of each source, never leave the
    bound; nor do those of a stretch that begins anywhere.
    """
    found, counts, first = Interleaving(shares), Counter[int](), dict[int, int]()
    for source, own in (found.at(start + n) for n in range(length)):
        assert own == first.setdefault(source, own) + counts[source], "a gap, or a repetition"
        counts[source] += 1
    for number, share in enumerate(shares):
        assert abs(counts[number] - length * share) <= max(0, len(shares) - 1)
    for ordinal in (start, start + length):
        source, before = found.at(ordinal)
        assert abs(before - ordinal * shares[source]) <= Fraction(len(shares) - 1, 2)


def test_a_whole_period_has_the_weights_to_the_letter() -> None:
    found = Interleaving([exact(weight) for weight in (0.55, 0.3, 0.1, 0.05)])
    for start in (0, 20, 10**15):
        counts = Counter(found.at(start + n)[0] for n in range(20))
        assert [counts[number] for number in range(4)] == [11, 6, 2, 1]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    write_model(folder / "model")
    judges = ["letter", "math", "math"] * 3
    rows = {
        "sums": [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(10)],
        "words": [{"question": f"{n}", "gold": {"text": f"a{n}"}} for n in range(7)],
        "both": [{"prompt": f"{n}", "answer": f"{n}", "judge": judges[n]} for n in range(9)],
    }
    for name, part in rows.items():
        write_rows(folder / f"{name}.jsonl", part)
    return folder


def mixed(place: Path, **changes: Any) -> PromptsConfig:
    sums: dict[str, Any] = {"source": str(place / "sums.jsonl"), "weight": 0.7}
    words: dict[str, Any] = {"source": str(place / "words.jsonl"), "weight": 0.3}
    words |= {"prompt_column": "question", "answer_column": "gold.text"}
    parts = ((sums, "math"), (words, "letter"))
    sources = tuple(PromptSourceConfig(**part, environment=name) for part, name in parts)
    return PromptsConfig(sources=sources, **changes)


NAMED = {
    "math": NamedVerifierConfig(verifier="math"),
    "letter": NamedVerifierConfig(answer_after="#"),
}


def load(config: PromptsConfig, place: Path, seed: int = 1) -> PromptList:
    return load_prompts(config, load_tokenizer(str(place / "model")), seed=seed)


def test_rows_carry_their_verifier_and_own_columns(place: Path) -> None:
    prompts = load(mixed(place), place)
    assert len(prompts) == 17 and [prompt.index for prompt in prompts] == list(range(17))
    assert [prompt.environment for prompt in prompts] == ["math"] * 10 + ["letter"] * 7
    assert [prompt.answer for prompt in prompts][9:12] == ["18", "a0", "a1"]
    whole = load(PromptsConfig(source=str(place / "sums.jsonl")), place)
    assert [prompt.token_ids for prompt in prompts][:10] == [one.token_ids for one in whole]
    assert {one.environment for one in whole} == {""}


def test_training_order_has_the_shares_and_each_source_its_epochs(place: Path) -> None:
    prompts, again = load(mixed(place), place), load(mixed(place), place)
    drawn = [prompts.at(n) for n in range(1000)]
    assert drawn[::-1] == [again.at(n) for n in reversed(range(1000))]
    assert drawn[:60] != [load(mixed(place), place, seed=2).at(n) for n in range(60)]
    assert Counter(one.environment for one in drawn) == {"math": 700, "letter": 300}
    for name, rows in (("math", range(10)), ("letter", range(10, 17))):
        own = [one.index for one in drawn if one.environment == name]
        for first in range(0, len(own) - len(rows) + 1, len(rows)):
            assert sorted(own[first : first + len(rows)]) == list(rows)
        assert own[: len(rows)] != own[len(rows) : 2 * len(rows)]  # shuffled anew


def test_a_file_twice_is_shuffled_twice(place: Path) -> None:
    part = PromptSourceConfig(source=str(place / "sums.jsonl"), weight=0.5, environment="math")
    prompts = load(PromptsConfig(sources=(part, part)), place)
    drawn = [prompts.at(n).index for n in range(20)]
    assert drawn[::2] != [index - 10 for index in drawn[1::2]]


def test_the_fingerprint_tells_mixtures_apart(place: Path) -> None:
    one = mixed(place)
    parts = one.sources
    weighed = replace(parts[0], weight=0.6), replace(parts[1], weight=0.4)
    other = replace(parts[0], environment="letter"), parts[1]
    changes = [{"sources": part} for part in (parts[::-1], weighed, other)]
    found = [one, replace(one, shuffle=False), *(replace(one, **change) for change in changes)]
    digests = [load(config, place).fingerprint for config in found]
    assert len(set(digests)) == len(digests) and digests[0] == load(one, place).fingerprint
    assert all(digest.startswith("17 rows, xxh3-128 ") for digest in digests)


def test_a_single_source_is_what_it_was(place: Path) -> None:
    """Digest and order of a recipe without a mixture, from before there were mixtures."""
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(9)]
    source = write_rows(place / "fixed.jsonl", rows)
    prompts = load(PromptsConfig(source=source), place, seed=3)
    assert prompts.fingerprint == "9 rows, xxh3-128 52c6cdd5730e67d8d3eb4cba84626845"
    assert [prompts.at(n).index for n in range(12)] == [0, 7, 5, 6, 8, 1, 2, 4, 3, 8, 3, 7]
    assert [Order(9, seed=3, shuffle=True).row(n) for n in range(3)] == [0, 7, 5]


def test_a_column_names_the_verifier(place: Path) -> None:
    def judged(name: str, column: str = "judge") -> PromptList:
        source = str(place / f"{name}.jsonl")
        return load(PromptsConfig(source=source, environment_column=column), place)

    assert [prompt.environment for prompt in judged("both")] == ["letter", "math", "math"] * 3
    with pytest.raises(ValueError, match=r"both.jsonl, line 1 .*'judges'.*environment_column to"):
        judged("both", "judges")
    write_rows(place / "gap.jsonl", [{"prompt": "1", "answer": "1", "judge": 3}])
    with pytest.raises(ValueError, match=r"gap.jsonl, line 1 .*verifier's name .*is 3"):
        judged("gap")


def ask(config: EnvironmentConfig, asked: list[tuple[Prompt, str]]) -> list[Verdict]:
    async def score(environment: Environment) -> list[Verdict]:
        scores = (environment.score(prompt, text, 5, False) for prompt, text in asked)
        return list(await asyncio.gather(*scores))

    return run(config, score, 120)


def prompt(name: str, answer: str = "1/2") -> Prompt:
    return Prompt(4, "", [], answer, {}, name)


def test_each_response_is_scored_by_its_rows_verifier(tmp_path: Path) -> None:
    """In worker processes, all at once: the built-in ones, a file's function and a weighted sum."""
    (tmp_path / "own.py").write_text("def length(prompt, response):\n    return len(response)\n")
    own = f"{tmp_path}/own.py:length"
    entries = {"own": NamedVerifierConfig(verifier=own)}
    entries["sum"] = NamedVerifierConfig(rewards={"math": 1.0, own: 0.25})
    config = EnvironmentConfig(num_workers=2, mixture=NAMED | entries)
    response = "\\boxed{0.5}"
    names = ["math", "letter", "own", "sum"] * 5
    found = ask(config, [(prompt(name), response) for name in names])
    assert [one.reward for one in found] == [1.0, 0.0, 11.0, 3.75] * 5
    assert [one.correct for one in found] == [True, False, False, True] * 5
    assert found[3].metrics == {"reward/math": 1.0, "reward/length": 11.0}
    assert ask(config, [(prompt("letter"), "so #1/2")])[0].correct
    (other,) = ask(config, [(prompt("of"), response)])
    assert other.failure == "error" and "math, letter, own, sum" in other.detail


def test_metrics_of_each_source() -> None:
    drawn, names = groups(3, 2), ("math", "code", "math")
    named = [
        replace(one, prompt=replace(one.prompt, environment=name))
        for one, name in zip(drawn, names, strict=True)
    ]
    found = describe(3, named, named, 1.0)
    of_math, of_code = [*named[0].rollouts, *named[2].rollouts], named[1].rollouts
    assert found["source/math/responses"] == len(of_math)
    mean = np.mean([one.verdict.reward for one in of_math])
    assert found["source/math/reward/mean"] == pytest.approx(mean)
    assert found["source/math/length/mean"] == np.mean([one.num_tokens for one in of_math])
    assert found["source/code/accuracy"] == np.mean([one.verdict.correct for one in of_code])
    assert found["source/code/length/truncated_share"] == 0.0
    assert not any(name.startswith("source/") for name in describe(3, drawn, drawn, 1.0))


def test_evaluations_have_metrics_of_each_source() -> None:
    one = {"correct": True, "reward": 1.0, "tokens": 4, "finish": "stop", "failure": "",
           "metrics": {}}  # fmt: skip
    other = one | {"correct": False, "reward": 0.0, "tokens": 8, "finish": "length"}
    found = summarise_records([one | {"environment": "math"}, other | {"environment": "code"}])
    assert found["accuracy"] == 0.5
    assert found["source/math/accuracy"] == 1.0 and found["source/code/accuracy"] == 0.0
    assert found["source/code/length/truncated_share"] == 1.0
    assert not any(name.startswith("source/") for name in summarise_records([one, other]))


def test_majorities_are_counted_by_the_verifier_of_each_row() -> None:
    """`math` counts 0.5 and 1/2 as equal, `exact_match` does not; other verifiers have no answers."""
    both = EnvironmentConfig(mixture={"math": NAMED["math"], "text": NamedVerifierConfig()})
    other = EnvironmentConfig(mixture={"other": NamedVerifierConfig(verifier="choice")})
    texts = [("#### 0.5", True), ("#### 0.50", True), ("#### .5", True)] + 2 * [("#### 1", False)]
    for name, majority in (("math", 1.0), ("text", 0.0), ("other", None)):
        records = [{"response": text, "correct": right, "environment": name}
                   for text, right in texts]  # fmt: skip
        found = over_samples(records, 1, other if name == "other" else both)
        assert [value for key, value in found.items() if "maj" in key][-1] == majority
    agent: Any = {"command": ["python"]}  # whose records have all that was said
    found = over_samples(records, 1, EnvironmentConfig(agent=agent))
    assert [value for key, value in found.items() if "maj" in key][-1] is None


def tree(place: Path, **changes: Any) -> dict[str, Any]:
    """A recipe with a mixture, with settings changed: {dotted key: value}."""
    whole = tiny_run(place, place / "model", 3)
    whole["folder"] = str(place / "run")
    whole["prompts"] = {
        "sources": [{"source": str(place / "sums.jsonl"), "weight": 0.7, "environment": "math"},
         {"source": str(place / "words.jsonl"), "weight": 0.3, "environment": "letter",
         "prompt_column": "question", "answer_column": "gold.text"}],
        "max_prompt_tokens": 8,
    }  # fmt: skip
    whole["evaluation"] = {
        "prompts": {"source": str(place / "both.jsonl"), "environment_column": "judge",
         "max_prompt_tokens": 8},
    }  # fmt: skip
    whole["environment"] = {
        "mixture": {"math": {"verifier": "math"}, "letter": {"answer_after": "#"}}
    }
    for key, value in changes.items():
        node, *inner = whole, *key.split("__")
        for part in inner[:-1]:
            node = node[int(part) if isinstance(node, list) else part]
        node[int(inner[-1]) if isinstance(node, list) else inner[-1]] = value
    return whole


def test_a_recipe_with_a_mixture_passes_all_checks(place: Path) -> None:
    config = recipes.from_tree(RunConfig, tree(place), where="recipe")
    inputs = plan_run(config, 1)
    assert inputs.prompts is not None and inputs.held_out is not None
    assert len(inputs.prompts) == 17 and len(inputs.held_out) == 9
    assert str(inputs).endswith("17 prompts")
    resumed = replace(inputs, resume_from=Path("run/step_000002"))
    assert str(resumed).endswith("17 prompts, resumes from run/step_000002")
    assert {one.environment for one in inputs.held_out} == {"math", "letter"}
    case = check_eval(config, 1).cases[0]
    assert {name: len(rows) for name, rows in case.sets.items()} == {str(place / "both.jsonl"): 9}


WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"prompts__sources__1__weight": 0.4}, ["0.7, 0.4", "add up to 1.1", "set weights"]),
    ({"prompts__sources__1__environment": "mth"}, ["sources[1].environment", "'mth'", "math, letter"]),
    ({"prompts__sources__1__colour": 1}, ["prompts.sources[1].colour", "known keys"]),
    ({"prompts__source": "x.jsonl"}, ["prompts.source", "prompts.sources", "one of the two"]),
    ({"prompts__sources__0__source": ""}, ["prompts.sources[0].source is empty"]),
    ({"prompts__sources__0__answer_column": ""}, ["sources[0].answer_column is empty", "math"]),
    ({"prompts__sources__0__environment_column": "x"}, ["prompts.sources[0]", "one of the two"]),
    ({"environment__mixture__spare": {}}, ["spare", "'spare'|no row of the data names"]),
    ({"environment__mixture__a b": {}}, ["'a b'", "letters"]),
    ({"environment__verifier": "math"}, ["environment.mixture", "verifier", "one of the two"]),
    ({"environment__mixture__math__answer_after": "#"}, ["environment.mixture.math.answer_after", "leave"]),
    ({"environment__mixture__math__verifier": "maths"}, ["environment.mixture.math", "'maths'", "exact_match"]),
    ({"environment__mixture": {}}, ["prompts.sources[0].environment is 'math'", "empty"]),
    ({"epochs": 2.0}, ["epochs is 2.0 beside prompts.sources, with which a run has steps"]),
    ({"evaluation__prompts__environment_column": ""}, ["evaluation.prompts names no verifier", "environment_column"]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "says"), WRONG, ids=[" ".join(one[0]) for one in WRONG])
def test_what_does_not_fit_is_one_error(
    changes: dict[str, Any], says: list[str], place: Path
) -> None:
    with pytest.raises(ValueError) as error:
        plan_run(recipes.from_tree(RunConfig, tree(place, **changes), where="recipe"), 1)
    message = str(error.value)
    assert "\n" not in message
    for part in says:
        assert any(one in message for one in part.split("|")), message


def test_a_row_with_an_unknown_name_is_refused(place: Path) -> None:
    rows = [{"prompt": "1", "answer": "1", "judge": name} for name in ("math", "maths")]
    wrong = tree(place, evaluation__prompts__source=write_rows(place / "odd.jsonl", rows))
    with pytest.raises(ValueError, match=r"row 1 .*'maths'.*math, letter"):
        plan_run(recipes.from_tree(RunConfig, wrong, where="recipe"), 1)


def test_every_named_verifier_is_tried_before_a_run(place: Path, tmp_path: Path) -> None:
    """Also one whose rows are rare, and though the others succeed."""
    prompts = load(mixed(place), place)
    first = rows_to_try(prompts)[: 2 * LEAST_ROWS]
    assert Counter(one.environment for one in first) == {"math": 4, "letter": 4}
    (tmp_path / "own.py").write_text("def score(prompt, response):\n    return 1 / 0\n")
    wrong = tree(place, environment__mixture__letter={"verifier": f"{tmp_path}/own.py:score"})
    with pytest.raises(ValueError, match=r"mixture.letter.verifier .*ZeroDivisionError"):
        plan_run(recipes.from_tree(RunConfig, wrong, where="recipe"), 1)


def test_thirds_written_with_six_digits_are_thirds() -> None:
    part = PromptSourceConfig(source="a.jsonl", weight=0.333333)
    PromptsConfig(sources=(part, part, part))
    part = PromptSourceConfig(source="a.jsonl", weight=0.3333)
    with pytest.raises(ValueError, match=r"add up to 0\.9999"):
        PromptsConfig(sources=(part, part, part))
    found = Interleaving([exact(0.333333)] * 3)
    assert Counter(found.at(n)[0] for n in range(3000)) == {0: 1000, 1: 1000, 2: 1000}


@pytest.mark.parametrize("verifier", ["code", "length"])
def test_rows_are_read_by_the_settings_of_their_own_verifier(
    verifier: str, place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rows lack what the other verifiers need; a held-out row without tests is named."""
    fields = {
        "code": {"cases": [{"input": "1", "output": "1"}], "answer": 0},
        "math": {"answer": "\\frac{1}{2}"},
        "choice": {"answer": "B"},
        "json_schema": {"shape": {"type": "object"}, "answer": 0},
        "length": {"words": 3, "cases": [{"input": "1", "output": "1"}], "answer": 0},
    }
    entries: dict[str, dict[str, Any]] = {
        "code": {"code": {"tests_column": "cases", "time_limit_s": 2}},
        "json_schema": {"json_schema": {"schema_column": "shape"}},
        "length": {
            "length": {"kind": "l1_exact", "target_column": "words", "verifier": "code"},
            "code": {"tests_column": "cases"},
        },
    }
    rows = [{"prompt": "1", "judge": name, **fields[name]} for name in [*fields, *fields]]
    source = write_rows(tmp_path / "all.jsonl", rows)
    prompts = {"source": source, "environment_column": "judge"}
    mixture = {name: {"verifier": name} | entries.get(name, {}) for name in fields}
    whole = tree(place, prompts=prompts, evaluation={"prompts": {**prompts}}, environment={})
    whole["environment"]["mixture"] = mixture
    for section in (whole["prompts"], whole["evaluation"]["prompts"]):
        section["max_prompt_tokens"] = 8
    plan_run(recipes.from_tree(RunConfig, whole, where="recipe"), 1)
    assert "environment.mixture.length.code: programs run" in capfd.readouterr().err
    rows[-1 if verifier == "length" else 5] |= {"cases": []}
    whole["evaluation"]["prompts"]["source"] = write_rows(tmp_path / "held.jsonl", rows)
    said = rf"evaluation.prompts, verifier .code., row \d: .*mixture.{verifier}.code.tests_column"
    with pytest.raises(ValueError, match=said):
        plan_run(recipes.from_tree(RunConfig, whole, where="recipe"), 1)
