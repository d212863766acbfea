"""What a forge and a package index show of the project: the README, links, security, citation, the workflow."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement

import reshard

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HOME = "https://github.com/reshard/reshard"
LINK = re.compile(r"\]\(([^)\s]+)\)")


def metadata() -> dict[str, Any]:
    shown = subprocess.run([sys.executable, "-m", "hatchling", "metadata"], cwd=ROOT, check=True, capture_output=True)
    return dict(json.loads(shown.stdout))


def of_the_repository(link: str) -> str:
    """Return the path that a link to the repository's files names."""
    match = re.match(rf"{HOME}/(?:blob|tree)/HEAD/|https://raw.githubusercontent.com/reshard/reshard/HEAD/", link)
    return link[match.end() :].partition("#")[0] if match else ""


def test_a_package_index_shows_no_link_that_leads_nowhere() -> None:
    text = metadata()["readme"]["text"]
    before = LINK.findall((ROOT / "README.md").read_text())
    after = LINK.findall(text)
    assert len(after) == len(before)
    for old, new in zip(before, after, strict=True):
        assert new.startswith("https://")
        assert new == old or of_the_repository(new) == old.partition("#")[0]
    (picture,) = re.findall(r"!\[[^\]]*\]\((\S+)\)", text)
    assert picture.startswith("https://raw.")


def test_addresses_of_the_project_are_those_of_the_readme() -> None:
    assert f"git clone {HOME} " in (ROOT / "README.md").read_text()
    assert {"Homepage", "Documentation", "Changelog", "Issues"} <= set(PROJECT["urls"])
    for address in PROJECT["urls"].values():
        assert address.startswith(HOME)
        assert (ROOT / of_the_repository(address)).exists()


def test_links_of_the_security_page_lead_somewhere() -> None:
    links = LINK.findall((ROOT / "SECURITY.md").read_text())
    assert f"{HOME}/security/advisories/new" in links
    assert len([link for link in links if (path := of_the_repository(link)) and (ROOT / path).is_file()]) >= 3
    assert all(link.startswith(HOME) for link in links)


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == reshard.__version__
    assert (citation["title"], citation["license"]) == (PROJECT["name"], PROJECT["license"])
    assert citation["abstract"] == PROJECT["description"]
    assert citation["repository-code"] == HOME
    assert {"cff-version", "message", "authors"} <= set(citation)


def test_the_workflow_runs_each_python_that_is_claimed() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    matrix = jobs["tests"]["strategy"]["matrix"]
    claimed = {name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)}
    assert claimed <= set(matrix["python"])
    assert PROJECT["requires-python"] == f">={matrix['python'][0]}"
    steps = [step for job in jobs.values() for step in job["steps"]]
    assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]) for step in steps if "uses" in step)
    commands = "\n".join(step["run"] for step in steps if "run" in step)
    for command in ("pytest -q", "ruff check", "mypy", "mkdocs build --strict", "--resolution lowest-direct", "--pre"):
        assert command in commands


def test_each_dependency_has_an_oldest_version() -> None:
    extras = [needed for group in PROJECT["optional-dependencies"].values() for needed in group]
    for text in (*PROJECT["dependencies"], *extras):
        assert any(part.operator == ">=" for part in Requirement(text).specifier), text
