"""The README's map names every file, its links lead somewhere, and its commands are what CI types."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_every_module_has_its_line():
    table = README[README.index("## One line a file") :].replace("\\_", "_")
    for path in [*ROOT.glob("jaxthru/**/*.py"), *ROOT.glob("pallas_kernels/**/*.py")]:
        if path.name == "__init__.py":
            continue
        line = f"{path.parent.name}/{path.name}", f"{path.parent.name}/** {path.name}"
        assert any(form in table for form in line), f"{path.relative_to(ROOT)} is not in README's map"


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"


def test_two_commands_and_ci_types_the_second():
    commands = re.findall(r"^python3\.12 -m venv .*$", README, re.MULTILINE)
    assert len(commands) == 2
    assert commands[0].endswith("-m jaxthru.train --config configs/quickstart.py")
    pattern = re.search(r"grep -E '(.*)' README.md", (ROOT / ".ci" / "run").read_text())[1]
    assert [c for c in commands if re.search(pattern, c)] == [commands[1]]
