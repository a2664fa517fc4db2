"""Environments of other libraries: what the adapters give is what the library itself gives. The
tests with a package are skipped where it is not installed in the adapter's version.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import yaml
from support.chat_templates import CHATML, FAMILIES, tokenizer_of
from support.commands import ROOT
from support.documented import block

from megarl.apps.adapters.packages import PINNED, package
from megarl.data.chat_template import ChatTemplate
from megarl.data.rows import read_rows
from megarl.data.source import PromptList, load_prompts
from megarl.environments.codec import Codec
from megarl.environments.scoring import Environment
from megarl.environments.verifiers import load_session, load_verifier
from megarl.environments.workers import Workers
from megarl.settings import config
from megarl.settings.config import RunConfig
from megarl.settings.data import PromptsConfig
from megarl.settings.environments import EnvironmentConfig
from megarl.system.lookup import AGENTS, SESSIONS, SOURCES
from megarl.types import Prompt


def is_installed(module: str) -> bool:
    """Whether the package of `module` is there in the version that the adapter needs."""
    name, version = PINNED[module]
    try:
        return importlib.metadata.version(name) == version
    except importlib.metadata.PackageNotFoundError:
        return False


def needs(module: str) -> pytest.MarkDecorator:
    """Skips a test where the package of `module` is missing."""
    said = f"{' '.join(PINNED[module])} is not installed"
    return pytest.mark.skipif(not is_installed(module), reason=said)


def prompts_of(source: str, template: str = "none", **arguments: Any) -> PromptList:
    """The prompts of a source, for a tokenizer of bytes."""
    settings: Any = {"template": template, "max_prompt_tokens": 4000, "arguments": arguments}
    return load_prompts(PromptsConfig(source=source, **settings), tokenizer_of(CHATML), seed=1)


@asynccontextmanager
async def playing(session: str, chats: bool = True) -> AsyncIterator[Workers]:
    """Worker processes for a session; observations are written as turns of a chat or bare."""
    codec = Codec.of(tokenizer_of(CHATML), chats=chats)
    pool = Workers(EnvironmentConfig(session=session, time_limit_s=60.0), codec)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


def ids(text: str) -> np.ndarray:
    """A turn of the model, with the token that ends it."""
    found = tokenizer_of(CHATML)(f"{text}<|im_end|>", add_special_tokens=False).input_ids
    return np.array(found, dtype=np.int32)


def text_of(token_ids: Any) -> str:
    """What token ids are as text, with special tokens."""
    return str(tokenizer_of(CHATML).decode(token_ids))


# Without the packages


@pytest.mark.parametrize(
    ("found", "said"), [(None, "is not installed"), ("0.0.1", "0.0.1 is installed")]
)
@pytest.mark.parametrize("module", PINNED)
def test_a_missing_or_another_package_is_one_error_that_says_what_to_install(
    module: str, found: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    name, wanted = PINNED[module]
    message = (
        f"{name} {said}, but '{module}' in the recipe needs {name} {wanted}; install it: pip"
        f" install {name}=={wanted}"
    )
    arguments = {"action": "message", "observation": "text"} if module == "openenv" else {}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        read_rows(f"{module}:a", "train", None, "prompts", arguments=arguments)
    load: Any = load_session if module in SESSIONS else load_verifier
    named: Any = {"session" if module in SESSIONS else "verifier": module}
    with pytest.raises(ValueError, match=re.escape(message)):
        load(EnvironmentConfig(**named))


def test_each_package_has_an_extra_of_the_adapters_version() -> None:
    setup = (ROOT / "setup.py").read_text()
    for name, version in PINNED.values():
        assert f'["{name}=={version}"]' in setup
    assert set(SOURCES) == set(PINNED) | set(AGENTS) and set(SESSIONS) < set(SOURCES)


def test_arguments_are_for_sources_that_make_their_rows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"prompts.arguments is for .*, but prompts.source is 'a"):
        read_rows("a.jsonl", "train", None, "prompts", arguments={"size": 3})
    (tmp_path / "reasoning_gym:a.jsonl").write_text('{"prompt": "1"}\n')
    assert read_rows(str(tmp_path / "reasoning_gym:a.jsonl"), "train", None, "prompts").rows


@pytest.mark.parametrize("name", FAMILIES)
def test_a_reply_to_the_model_is_what_the_chat_template_writes(name: str) -> None:
    """The prompt, the model's turn with the token that ends it, and an observation make up the text
    of the whole chat.
    """
    tokenizer: Any = tokenizer_of(FAMILIES[name])
    template = ChatTemplate(tokenizer)
    asked = {"role": "user", "content": "3+5"}
    chat = [asked, {"role": "assistant", "content": "7"}, {"role": "user", "content": "higher"}]
    before, after = Codec.of(tokenizer, chats=True).around
    written = template.text([asked], "", asks=True) + "7" + FAMILIES[name].end
    spaced = template.text(chat, "", asks=True).replace(" 7", "7")  # of Mistral's
    assert f"{written}{before}higher{after}" == spaced
    assert Codec.of(tokenizer).around == ("", "")


def test_a_template_without_a_second_question_is_refused() -> None:
    once = "{{ messages[0].content }}|{{ messages[1].content if messages[1] }}<|im_end|>"
    with pytest.raises(ValueError, match="does not write a turn of the user behind one of the"):
        Codec.of(tokenizer_of(CHATML, once), chats=True)


ROLES = """
from megarl.environments.session import Observation

class Told:
    def start(self, prompt):
        return Observation("", role=prompt.answer)
    def step(self, text, token_ids):
        return Observation("higher", role="user")
"""


@pytest.mark.parametrize(
    ("chats", "read"),
    [(False, "higher"),
     (True, "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n")],
)  # fmt: skip
async def test_an_observation_becomes_a_turn_of_the_user(
    chats: bool, read: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(ROLES)
    async with playing(f"{tmp_path}/own.py:Told", chats) as pool:
        assert (await pool.begin("a", Prompt(0, "?", [], ""))).observation == []
        assert text_of((await pool.step("a", ids("7"))).observation) == read
        refused = await pool.begin("b", Prompt(0, "?", [], "user"))
        assert "start returned an observation with a role" in refused.detail


PAGES = {
    "reasoning_gym": "reasoning_gym", "reasoning_gym_tags": "reasoning_gym",
    "reasoning_gym_several": "reasoning_gym", "textarena": "textarena", "gymnasium": "gymnasium",
}  # fmt: skip
"""{block of the how-to pages: its package}"""


@pytest.mark.parametrize("name", [pytest.param(one, marks=needs(PAGES[one])) for one in PAGES])
def test_the_recipe_of_a_page_makes_its_prompts(name: str) -> None:
    tree = yaml.safe_load(block(f"yaml {name}")) | {"folder": "run", "model": {"path": "model"}}
    read: Any = config.from_tree(RunConfig, tree, where=name)
    found = load_prompts(read.prompts, tokenizer_of(CHATML), seed=1)
    assert len(found) == sum(part.arguments["size"] for part in read.prompts.parts)


# reasoning_gym


@needs("reasoning_gym")
def test_problems_are_the_same_again_and_those_of_another_seed_differ() -> None:
    first, again = (prompts_of("reasoning_gym:chain_sum", size=20, seed=1) for _ in range(2))
    assert first.fingerprint == again.fingerprint and len(first) == 20
    assert [one.text for one in first] == [one.text for one in again]
    shifted = [one.text for one in prompts_of("reasoning_gym:chain_sum", size=20, seed=2)]
    assert shifted[:-1] == [one.text for one in first][1:], "as the page says of the next seed"
    other = prompts_of("reasoning_gym:chain_sum", size=20, seed=100)
    assert not {one.text for one in other} & {one.text for one in first}
    few = read_rows("reasoning_gym:chain_sum", "train", 3, "prompts", arguments={"seed": 1}).rows
    assert [row["prompt"] for row in few] == [one.text for one in first][:3]


@needs("reasoning_gym")
@pytest.mark.parametrize(("name", "arguments", "said"), [
    ("chain_sums", {}, "Dataset 'chain_sums' not registered; set the name and settings of a"),
    ("chain_sum", {"terms": 3}, "unexpected keyword argument 'terms'"),
    ("chain_sum", {"min_terms": -3}, "min_terms must be positive"),
    ("chain_sum", {"size": 0}, "size must be positive"),
])  # fmt: skip
def test_a_data_set_that_cannot_be_made_is_one_error(
    name: str, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=f"^reasoning_gym:{name} with the arguments .*{said}"):
        read_rows(f"reasoning_gym:{name}", "train", None, "prompts", arguments=arguments)


@needs("reasoning_gym")
async def test_rewards_are_those_of_the_data_sets_scorers() -> None:
    """Of right, nearly right and wrong answers, in tags, behind a mark or bare; among the data sets
    are one without a single answer, one whose metadata is no JSON, and one whose scorer raises.
    """
    library = package("reasoning_gym")
    names = ("chain_sum", "rush_hour", "graph_color", "calendar_arithmetic", "prime_factorization")
    plain = Environment(EnvironmentConfig(verifier="reasoning_gym"), Codec.of(tokenizer_of(CHATML)))
    marked = EnvironmentConfig(verifier="reasoning_gym", answer_after="####")
    after = Environment(marked, Codec.of(tokenizer_of(CHATML)))
    scores = set()
    try:
        for name in names:
            data, prompts = (
                library.create_dataset(name, size=4, seed=3),
                prompts_of(f"reasoning_gym:{name}", size=4, seed=3),
            )
            for prompt, entry in zip(prompts, data, strict=True):
                for said in (str(entry["answer"]), f"{entry['answer']} or so", "none", "F+1"):
                    try:
                        want, errors = data.score_answer(said, entry), 0.0
                    except Exception:
                        want, errors = 0.0, 1.0
                    for judge, response in (
                        (plain, said),
                        (plain, f"<answer>1</answer> no: <answer> {said} </answer>."),
                        (after, f"Well #### 1 ####{said}"),
                    ):
                        found = await judge.score(prompt, response, 9, False)
                        assert not found.failure, found
                        assert found.reward == pytest.approx(float(want)), (name, response)
                        assert found.metrics["scorer_errors"] == errors
                        scores.add((name, found.reward > 0, errors))
        assert (await after.score(prompt, "1", 9, False)).reward == 0.0, "no mark, no answer"
        stranger = await plain.score(Prompt(0, "1+1=", [], "2"), "2", 9, False)
        assert "is of no data set of reasoning_gym" in stranger.detail
    finally:
        await plain.close()
        await after.close()
    assert {("chain_sum", True, 0.0), ("prime_factorization", False, 1.0)} < scores


# textarena and gymnasium


def played(session: str, found: Prompt, turns: list[str]) -> Any:
    """Every reply of a session without worker processes, to the end of the episode or of `turns`."""
    game = load_session(EnvironmentConfig(session=session))()
    game.start(found)
    replies = []
    for turn in turns:
        replies.append(game.step(turn, ids(turn)))
        if isinstance(replies[-1], float):
            break
    game.close()
    return replies


@needs("textarena")
async def test_a_game_is_rewarded_as_textarena_rewards_it() -> None:
    prompts = list(prompts_of("textarena:GuessTheNumber-v0", "chat", size=5, seed=7))
    library, rewards = package("textarena"), []
    async with playing("textarena") as pool:
        for number, found in enumerate(prompts):
            guesses = [f"I say [{(7 * turn + number) % 20 + 1}]." for turn in range(20)]
            if number % 2:  # two turns without a guess end the game
                guesses[2:] = ["none"] * 2
            game = library.make("GuessTheNumber-v0-raw")
            game.reset(num_players=1, seed=7 + number)
            _, rules = game.get_observation()
            assert rules[0][1] in found.text
            outcome = await pool.begin(str(number), found)
            for guess in guesses:
                is_over, _ = game.step(guess)
                outcome = await pool.step(str(number), ids(guess))
                assert outcome.failure == ""
                if is_over:
                    assert outcome.score == float(game.close()[0][0])
                    rewards.append(outcome.score)
                    break
                read = text_of(outcome.observation)
                hint = game.get_observation()[1][-1][1]
                assert read == f"\n<|im_start|>user\n{hint}<|im_end|>\n<|im_start|>assistant\n"
                assert outcome.reward == 0.0
    assert len(rewards) == 5 and len(set(rewards)) > 1


@needs("textarena")
def test_games_beside_one_another_do_not_change_each_other() -> None:
    """Games draw from the random numbers of the process."""
    first, second = prompts_of("textarena:2048-v0-easy", size=2, seed=3)
    turns = ["[Left]", "[Down]", "[Right]", "[Up]"] * 5
    random.seed(1)
    alone = [played("textarena", one, turns) for one in (first, second)]
    games = [load_session(EnvironmentConfig(session="textarena"))() for _ in range(2)]
    random.seed(2)
    outer = random.getstate()
    games[0].start(first)
    games[1].start(second)
    count = min(map(len, alone))  # a game may end before its last turn
    beside = [[game.step(turn, ids(turn)) for game in games] for turn in turns[:count]]
    assert [list(one) for one in zip(*beside, strict=True)] == [one[:count] for one in alone]
    assert random.getstate() == outer and count > 4


@needs("gymnasium")
def test_turns_are_the_steps_of_gymnasium() -> None:
    """Words and numbers as actions; a rendering as the observation; what is no action is told."""
    library = package("gymnasium")
    lake: dict[str, Any] = {"render_mode": "ansi", "is_slippery": True}
    words = ["left", "down", "right", "up"]
    named = [*prompts_of("gymnasium:FrozenLake-v1", size=20, actions=words, **lake)]
    numbered = [*prompts_of("gymnasium:FrozenLake-v1", size=20, **lake)]
    assert named[0].text == "[S]FFF\nFHFH\nFFFH\nHFFG"
    lengths = set()
    for seed in range(20):
        env: Any = library.make("FrozenLake-v1", **lake)
        env.reset(seed=seed)
        moves = [1, 2, 1, 1, 2, 2, 1, 2] * 15
        said = [f"Not up, but {words[move].upper()}!" for move in moves]
        replies = played("gymnasium", named[seed], said)
        assert replies == played("gymnasium", numbered[seed], [f"3 or {move}" for move in moves])
        for move, reply in zip(moves, replies, strict=False):
            _, reward, is_ended, is_cut, _ = env.step(move)
            if is_ended or is_cut:
                assert reply == float(reward)
                lengths.add(len(replies))
                break
            assert reply.reward == float(reward)
            plain = re.sub(r"\x1b\[\d+m", "", env.render()).strip()
            assert reply.text.replace("[", "").replace("]", "") == plain
        else:
            raise AssertionError("no episode ended")
    assert len(lengths) > 2
    (told,) = played("gymnasium", named[0], ["downwards"])
    assert (told.text, told.reward) == ("Write one of: left, down, right, up", 0.0)


TEXTS = """
import gymnasium
from gymnasium.spaces import Text

class Parrot(gymnasium.Env):
    observation_space = action_space = Text(40, charset="no: Saywhat?0123456789")
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = str(self.np_random.integers(1000))
        return f"Say {self.word}", {}
    def step(self, action):
        return f"no: {action}", len(action) / 8, action == self.word, False, {}

gymnasium.register("Parrot-v0", entry_point=Parrot)
"""


@needs("gymnasium")
def test_an_environment_of_texts_is_played_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parrots.py").write_text(TEXTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = [*prompts_of("gymnasium:parrots:Parrot-v0", size=3, seed=4)]
    assert len({one.text for one in found}) == 3
    word = found[1].text.removeprefix("Say ")
    told, last = played("gymnasium", found[1], ["what?", word])
    assert (told.text, told.reward, last) == ("no: what?", 5 / 8, len(word) / 8)


@pytest.mark.parametrize(("source", "arguments", "said"), [
    ("gymnasium:CartPole-v1", {}, "observations are ndarray, not texts, and its render_mode"),
    ("gymnasium:Pendulum-v1", {}, "its actions are Box"),
    ("gymnasium:FrozenLake-v1", {"actions": ["up"]}, "has 1 words for 4 actions"),
    ("gymnasium:Nowhere-v1", {}, "doesn't exist"),
    ("textarena:TicTacToe-v0", {}, "number of players has to be 2"),
    ("textarena:Nothing-v0", {}, "not found in registry"),
    ("textarena:GuessTheNumber-v0", {"size": -1}, "arguments.size is -1; set it to a whole"),
])  # fmt: skip
def test_an_environment_that_cannot_be_played_is_one_error(
    source: str, arguments: dict[str, Any], said: str
) -> None:
    if not is_installed(source.partition(":")[0]):
        pytest.skip(f"{source.partition(':')[0]} is not installed")
    with pytest.raises(ValueError, match=said):
        read_rows(source, "train", None, "prompts", arguments=arguments)


# OpenEnv


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[str]:
    """The address of a server with the environment of OpenEnv's own template, with room for two."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = ROOT / "tests" / "support" / "echo_server.py"
    more = getattr(request, "param", ())
    folder = str(tmp_path_factory.mktemp("server"))
    command = [sys.executable, str(program), folder, str(port), "2", *more]
    address = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        try:
            for _ in range(1800):  # it imports a lot
                try:
                    httpx2.get(f"{address}/health")
                    break
                except httpx2.TransportError:
                    time.sleep(0.1)
            yield address
        finally:
            process.kill()


ECHO = {"action": "message", "observation": "echoed_message"}


@needs("openenv")
async def test_rollouts_share_the_environments_of_a_server(server: str) -> None:
    """Five at a time where the server has room for two; each turn has the server's reward."""
    shown = yaml.safe_load(block("yaml openenv"))["prompts"]["arguments"]
    assert shown == {"size": 64, **ECHO}
    made = await asyncio.to_thread(prompts_of, f"openenv:{server}", "chat", size=5, **ECHO)
    assert "Echo environment ready!" in made.at(0).text
    async with playing("openenv") as pool:

        async def one(number: int, found: Prompt) -> None:
            assert (await pool.begin(str(number), found)).observation == []
            for turn in range(1, 4):
                said = "a" * turn * (number + 1)
                outcome = await pool.step(str(number), ids(said))
                assert outcome.reward == len(said) * 0.1
                assert f"user\n{said}<|im_end|>" in text_of(outcome.observation)
            await pool.cut_off(str(number))

        await asyncio.gather(*(one(number, found) for number, found in enumerate(made)))


@needs("openenv")
async def test_what_is_wrong_with_a_server_is_said(server: str) -> None:
    def read(address: str, **arguments: Any) -> Any:
        return asyncio.to_thread(prompts_of, f"openenv:{address}", size=1, **arguments)

    with pytest.raises(ValueError, match="observation to one of: echoed_message"):
        await read(server, action="message", observation="text")
    with pytest.raises(ValueError, match=r"observation is missing; .* as in http.*/schema"):
        await read(server, action="message")
    with pytest.raises(ValueError, match=r"no OpenEnv server answers at http://127.0.0.1:9: "):
        await read("http://127.0.0.1:9", **ECHO)
    (found,) = await read(server, action="words", observation="echoed_message")
    async with playing("openenv") as pool:
        await pool.begin("a", found)
        assert "VALIDATION_ERROR" in (await pool.step("a", ids("b"))).detail


@needs("openenv")
@pytest.mark.parametrize("server", [("ignores_seeds",)], indirect=True)
async def test_an_environment_that_begins_otherwise_fails(server: str) -> None:
    made = await asyncio.to_thread(prompts_of, f"openenv:{server}", size=2, **ECHO)
    async with playing("openenv") as pool:
        outcome = await pool.begin("a", made.at(0))
        assert "began with another observation than when the prompts were" in outcome.detail


@pytest.mark.parametrize("session", SESSIONS)
def test_a_row_that_is_no_episode_is_refused(session: str) -> None:
    if not is_installed(session):
        pytest.skip(f"{session} is not installed")
    game = load_session(EnvironmentConfig(session=session))()

    async def start() -> None:
        begun = game.start(Prompt(3, "", [], "", {"prompt": "a"}))
        await begun

    with pytest.raises(ValueError, match=f"row 3 is no episode; set prompts.source to {session}:"):
        asyncio.run(start())
