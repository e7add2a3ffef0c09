"""README.md and docs/ are true: links, commands, options, YAML and messages are those of the code."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
import yaml

from asapc.cli import app
from asapc.inputs.load import load_teacher
from asapc.inputs.recipe import load_recipe
from asapc.pipeline import inspect
from asapc.report.gates import load_gates
from asapc.study import load_grid

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
IDS = [path.name for path in PAGES]
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = typer.main.get_command(app)
PARSERS: dict[str, Any] = {"recipe": load_recipe, "gates": load_gates, "grid": load_grid}


def text_of(path: Path) -> str:
    """With the files of docs/ that it includes, as the site shows it."""
    included = re.compile(r'^--8<-- "(docs/[^":]+)"\n', re.MULTILINE)
    return included.sub(lambda found: text_of(ROOT / found[1]), path.read_text(encoding="utf-8"))


def blocks(path: Path) -> Iterator[tuple[str, str, str]]:
    """Language, what stands after it, and the text of every fenced block."""
    for match in BLOCK.finditer(text_of(path)):
        yield match[1], match[2].strip(), match[3]


def title(after: str) -> str | None:
    found = re.search(r'title="([^"]+)"', after)
    return found and found[1]


def prose(path: Path) -> str:
    """Without fenced blocks; what they hold is no link."""
    return BLOCK.sub("", text_of(path))


def anchors(path: Path) -> set[str]:
    """As mkdocs makes them of headings."""
    headings = re.findall(r"^#{1,6} (.+)$", prose(path), re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings)
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_and_anchors_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        assert "://" not in target, f"{target}: pages link to this checkout only"
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.is_file() and ROOT in path.parents, target
        assert not anchor or anchor in anchors(path), target


def test_every_page_is_in_the_navigation() -> None:
    def pages(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for inner in entry.values() if isinstance(entry, dict) else entry:
                yield from pages(inner)

    nav = yaml.safe_load(text_of(ROOT / "mkdocs.yml"))["nav"]
    assert sorted(pages(nav)) == sorted(path.name for path in DOCS.glob("*.md"))
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)\)", text_of(ROOT / "README.md")))
    assert {path.name for path in DOCS.glob("*.md")} - linked == {"index.md", "security.md"}


def invocations(path: Path) -> Iterator[list[str]]:
    """The words after `asapc` wherever a page calls it: in backticks, on indented lines, in sessions."""
    text = text_of(path)
    lines = [line[2:] for _, _, block in blocks(path) for line in block.splitlines() if line[:2] == "$ "]
    lines += re.findall(r"^ {4}(.*\basapc .*)$", text, re.MULTILINE)
    lines += [span.replace("\n", " ") for span in re.findall(r"`(asapc\s[^`]*)`", prose(path))]
    for line in lines:
        line = re.split(r" [|>] | 2>| # |  #", line)[0]
        call = re.match(r"(?:\S+ )*?(?:-m )?asapc +([a-z]+\b.*)", line)
        if call is not None:
            yield call[1].replace("\\", "").replace("(", "").replace(")", "").split()


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_and_options_exist(page: Path) -> None:
    commands = COMMAND.commands  # type: ignore[attr-defined]
    for name, *words in invocations(page):
        assert name in commands, f"asapc {name}"
        options = {option for own in commands[name].params for option in (*own.opts, *own.secondary_opts)}
        for word in words:
            option = re.match(r"\[?(--?[a-z][a-z0-9-]*)", word)
            assert option is None or option[1] in options | {"--help"}, f"asapc {name} {word}"


def test_every_option_that_pages_name_exists() -> None:
    """Also where it stands alone, as in `--trust`."""
    commands = COMMAND.commands  # type: ignore[attr-defined]
    parameters = [own for command in [COMMAND, *commands.values()] for own in command.params]
    options = {option for own in parameters for option in (*own.opts, *own.secondary_opts)}
    others = {"--help", "--write"}  # of every command, of docs/outputs.py
    for page in PAGES:
        for span in re.findall(r"`(--[a-z][^`]*)`", prose(page)):
            assert re.match(r"--[a-z0-9-]+", span)[0] in options | others, f"{page.name}: {span}"  # type: ignore[index]


def test_every_command_is_documented() -> None:
    table = text_of(DOCS / "commands.md")
    assert [name for name in COMMAND.commands if f"| `asapc {name}" not in table] == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_yaml_is_what_the_parsers_take(page: Path, tmp_path: Path) -> None:
    for number, (language, after, block) in enumerate(blocks(page)):
        if language == "yaml":
            kind = title(after)
            assert kind is not None, 'a YAML block says what it is: title="recipe", "gates" or "grid"'
            path = tmp_path / f"{number}.yaml"
            path.write_text(block, encoding="utf-8")
            PARSERS[kind.removesuffix(".yaml")](path)


def test_the_default_recipe_is_the_documented_one(tmp_path: Path) -> None:
    from asapc.inputs.recipe import Recipe

    path = tmp_path / "recipe.yaml"
    path.write_text(next(block for kind, _, block in blocks(DOCS / "recipes.md") if kind == "yaml"))
    assert load_recipe(path) == Recipe()
    assert set(yaml.safe_load(path.read_text())) == set(Recipe().to_dict())


def test_shipped_examples_are_what_the_parsers_take() -> None:
    for path in (ROOT / "examples" / "gates.yaml", ROOT / "examples" / "ci" / "gates.yaml"):
        load_gates(path)
    for path in (ROOT / "benchmarks" / "grids").glob("*.yaml"):
        load_grid(path)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_python_is_python_and_runs_where_it_says_so(page: Path) -> None:
    for language, after, block in blocks(page):
        if language == "python":
            code = compile(block, str(page), "exec")
            if after.split(" ")[0] == "runnable":
                exec(code, {"__name__": "page"})


@pytest.mark.parametrize("name", ["my_model.py", "train.py", "gates.yaml"])
def test_the_tutorial_shows_its_files(name: str) -> None:
    shown = {title(after): block for _, after, block in blocks(DOCS / "tutorial.md")}
    assert shown[name] == text_of(DOCS / "tutorial" / name)


def test_what_pages_include_exists() -> None:
    """Whole files, their lines, and their marked sections."""
    for page in PAGES:
        for name, part in re.findall(r'^--8<-- "([^":]+):?([^"]*)"$', text_of(page), re.MULTILINE):
            included = text_of(ROOT / name)
            assert not part or part.isdigit() or f"[start:{part}]" in included, f"{page.name}: {name}"


def test_sessions_are_marked_and_run() -> None:
    """Every session of a page can be run again by docs/outputs.py, and shows what it printed."""
    for page in PAGES:
        text = text_of(page)
        assert text.count("```console\n") == text.count("<!-- run -->\n```console\n"), page.name
    sessions = [block for kind, _, block in blocks(DOCS / "tutorial.md") if kind == "console"]
    lines = [line[2:] for block in sessions for line in block.splitlines() if line[:2] == "$ "]
    order = [shlex.split(line)[:2] for line in lines]
    steps = ("inspect", "calibrate", "compile", "report")
    assert order[:5] == [["python", "train.py"], *(["asapc", step] for step in steps)]
    assert all(len(block.splitlines()) > 2 for block in sessions)


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells, on fewer and shorter texts: the line of settings is replaced and nothing else."""
    notebook = json.loads(text_of(DOCS / "notebooks" / "tutorial.ipynb"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in cells) and any(cell["outputs"] for cell in cells)
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    source = "\n".join("".join(cell["source"]) for cell in cells)
    settings = "STEPS, EXAMPLES, LENGTH = 240, 1024, 256"
    assert source.count(settings) == 1
    shutil.copytree(DOCS / "tutorial", tmp_path / "tutorial")
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    monkeypatch.syspath_prepend(str(tmp_path / "tutorial"))
    namespace: dict[str, Any] = {"__name__": "notebook"}
    exec(source.replace(settings, "STEPS, EXAMPLES, LENGTH = 1, 120, 8"), namespace)
    assert namespace["report"].facts["sites"]


FOLDERS = ("asapc", "passes", "calibration")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def defines(path: Path, name: str) -> bool:
    return bool(re.search(rf"^(?:def |class |(?:\w+, )*){name}\b", text_of(path), re.MULTILINE))


def stands(named: str) -> bool:
    """Whether a file, a script's command, a test, a module of asapc or what one defines is there."""
    file, _, test = named.partition("::")
    if test:
        return defines(ROOT / "tests" / file, test)
    file = named.removeprefix("python ").split()[0]
    if (ROOT / file).is_file() or (ROOT / "benchmarks" / "results" / file).is_file():
        return True
    folder, *names = named.split(".")
    module = (ROOT if folder in FOLDERS else ROOT / "asapc").joinpath(folder, *names)
    if module.with_suffix(".py").is_file() or (module / "__init__.py").is_file():
        return True
    home = module.parent.with_suffix(".py")
    return home.is_file() and defines(home, names[-1])


def test_rows_of_papers_name_what_exists_or_say_why_not() -> None:
    rows = [row for row in text_of(DOCS / "papers.md").splitlines() if row.startswith("| ")]
    assert len(rows) > 60
    for row in rows:
        what, where, test, result = (cell.strip() for cell in row.strip("|").split("|"))
        assert what and where and test and result, row
        assert "`" in where + result or "not " in result or what == "what", row
        assert "::" in test or test in ("-", "test"), row
        missing = [named for named in re.findall(r"`([^`]+)`", row) if not stands(named)]
        assert not missing, f"{row}: {missing}"


def spelt(text: ast.expr) -> str:
    """A string of the code, with `…` for what is filled in."""
    if isinstance(text, ast.JoinedStr):
        return "".join(spelt(part) for part in text.values)
    return text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else "…"


def test_what_verification_finds_is_in_troubleshooting() -> None:
    """An InputError says how to change the input.  Other errors are not about the input alone."""
    page = " ".join(text_of(DOCS / "troubleshooting.md").split())
    missing = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(text_of(path))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                rule = max(spelt(node.args[0]).split("…"), key=len).strip(" :,")
                if node.func.id in ("VerificationError", "NoSiteError") and rule not in page:
                    missing.append(f"{path.relative_to(ROOT)}:{node.lineno}: {rule}")
    assert not missing, "add a row to docs/troubleshooting.md for\n" + "\n".join(missing)


def test_troubleshooting_quotes_messages_of_the_code() -> None:
    nodes = [node for path in SOURCES for node in ast.walk(ast.parse(text_of(path)))]
    code = "\n".join(spelt(node) for node in nodes if isinstance(node, ast.Constant | ast.JoinedStr))
    rows = re.findall(r"^- ((?:`[^`]+`[,\s]*)+)[:,]", text_of(DOCS / "troubleshooting.md"), re.MULTILINE)
    quoted = [" ".join(message.split()) for row in rows for message in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) > 20
    parts = [part.strip() for message in quoted for part in message.split("…")]
    assert [part for part in parts if part not in code] == []


def test_installation_lines_are_for_a_clone() -> None:
    """asapc is on no package index: a line that names it would install something else, or nothing."""
    for page in [*PAGES, *ROOT.glob("examples/**/*.md"), *ROOT.glob("examples/**/*.yml")]:
        assert not re.search(r"pip install [^\n`]*(?<![\w/.-])'?asapc(?![\w/-])", text_of(page)), page
    for folder in ("asapc", "passes", "calibration"):
        said = {p.name for p in (ROOT / folder).rglob("*.py") if "pip install" in text_of(p)}
        assert said <= {"hints.py"}, "asapc/terminal/hints.py is the home of installation lines"


(_, FRAME), *SPELLINGS = [
    (title(after), block) for _, after, block in blocks(DOCS / "recognition.md") if title(after)
]  # fmt: skip
NAMES = [re.findall(r"class (\w+)", block)[0] for _, block in SPELLINGS]


@pytest.mark.parametrize(("told", "block", "name"), [
    (told, block, name) for (told, block), name in zip(SPELLINGS, NAMES, strict=True)
], ids=NAMES)  # fmt: skip
def test_what_is_told_of_a_spelling(told: str, block: str, name: str, tmp_path: Path) -> None:
    """What compiles replays, and the rest is refused for that reason."""
    (tmp_path / "layer.py").write_text(f"{FRAME}\n\n{block}", encoding="utf-8")
    x = np.random.default_rng(0).standard_normal((64, 12, 8)).astype(np.float32)
    x[::2, 9:] = 0  # padding, for the layer that asks
    np.savez(tmp_path / "x.npz", x=x)
    teacher = load_teacher(f"{tmp_path / 'layer.py'}:{name}")
    (layer,) = inspect(teacher, str(tmp_path / "x.npz"))["sites"]
    if told == "compiles":
        assert layer["status"] == "matched", layer["reason"]
    else:
        assert layer["status"] != "matched" and told.removeprefix("not compiled: ") in layer["reason"]
