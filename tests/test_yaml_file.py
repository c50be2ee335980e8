"""What a person's editor, git or a stranger puts into params.yaml. dvc's own reader decides what it means."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from dvc.utils.serialize import load_yaml

from tap.yaml_file import read_mapping


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "params.yaml"


@pytest.mark.parametrize(
    "text",
    [
        "a: {b: [1, 0o17, 010, 1e3, .5, on, ~, null, 'x']}",
        "a: &x {b: 1, c: 2}\nd: {<<: *x, c: 3}",
        "a: &x [1]\nb: *x",
        "\ufeffa: 1",
        "a: ünï\r\nb: 2\r\n",
        "%YAML 1.1\n---\na: 010\n",
    ],
)
def test_what_is_read_is_what_dvc_reads(path: Path, text: str) -> None:
    path.write_bytes(text.encode())
    assert json.dumps(read_mapping(path)) == json.dumps(load_yaml(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2001-99-99", r"params\.yaml, line 2 is not valid YAML: this value cannot be read \(month must be in"),
        ("a: 1\nb: !!bool x", r"params\.yaml, line 2 is not valid YAML: this value cannot be read"),
        ("b: " + "9" * 5000, r"line 1 is not valid YAML: this value cannot be read \(Exceeds the limit"),
        ("b: 0x" + "F" * 5000, r"line 1 is not valid YAML: this value cannot be read \(a number of more than 64 bits\)"),
        ("b: !!python/object/apply:os.system [echo]", r"line 1 is not valid YAML: could not determine a constructor"),
        ("a: 1\n\tb: 2", r"line 2 is not valid YAML: found character '\\t' that cannot start any token"),
        ("a: \x00", r"params\.yaml is not valid YAML: .*special characters are not allowed"),
        ("  a:\n%YAML 9.9", r"params\.yaml is not valid YAML: the parser fails with KeyError"),
        ("a: [1, 2", r"is not valid YAML: "),
        ("a: 1\n---\nb: 2", r"is not valid YAML: .*another document"),
        ("a: 1\na: 2", r'line 2: found duplicate key "a": keep one'),
        ("a: 1\n2: 3", r"line 2 is not valid YAML: this key is not text: rename or quote it"),
        ("a: 1\n[b]: 3", r"line 2 is not valid YAML: this key is not text"),
        ('a: 1\n"\\e[2J": 3', r"line 2 is not valid YAML: this key is not one of at most 100 letters"),
        ("a: &x [*x]", r"values nest deeper than 50 levels"),
        ("a: " + "[" * 5000, r"nest deeper than 50 levels"),
        ("a: " + "[" * 60 + "]" * 60, r"values nest deeper than 50 levels"),
        ("- 1", r"params\.yaml must have a mapping at its top level"),
        ("", r"params\.yaml must have a mapping at its top level"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_printable_sentence(path: Path, text: str, message: str) -> None:
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        read_mapping(path)
    assert str(error.value).isprintable() and str(error.value).startswith(str(path))


def test_other_encodings_and_what_is_no_file(path: Path) -> None:
    path.write_text("a: 1", "utf-16")  # as ruamel alone would accept, but DVC does not
    with pytest.raises(ValueError, match=r"params\.yaml is not text in UTF-8 \(byte 0\): save it"):
        read_mapping(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ValueError, match=r"params\.yaml cannot be read \(Is a directory\)"):
        read_mapping(path)


BOUNDED = """
import resource, sys
from pathlib import Path
from tap.yaml_file import read_mapping

resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
try:
    read_mapping(Path(sys.argv[1]))
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(("first", "rest"), [("[x]", "[{}]"), ("{x: 1}", "{{<<: [{}]}}")])
def test_a_bomb_of_aliases_is_refused_in_bounded_time_and_memory(path: Path, first: str, rest: str) -> None:
    lines = [f"a0: &a0 {first}"] + [f"a{n}: &a{n} {rest.format(', '.join([f'*a{n - 1}'] * 9))}" for n in range(1, 12)]
    path.write_text("\n".join(lines))
    said = subprocess.run([sys.executable, "-c", BOUNDED, str(path)], capture_output=True, text=True, check=True).stdout
    assert "line 6 is not valid YAML: with its aliases, this stands for more than 100000 values or 50 levels" in said


def test_a_ladder_of_aliases_is_refused(path: Path) -> None:
    path.write_text("\n".join(["a0: &a0 [x]"] + [f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 2000)]))
    with pytest.raises(
        ValueError, match=r"line 50 is not valid YAML: with its aliases, this stands for more than .* 50 levels"
    ):
        read_mapping(path)


def test_a_conflict_of_a_merge_is_named_with_its_line(path: Path) -> None:
    path.write_text("scale: cpu\n<<<<<<< HEAD\nseeds: [1]\n=======\nseeds: [2]\n>>>>>>> other\n")
    with pytest.raises(
        ValueError, match=r"params\.yaml, line 2: two versions conflict since a merge: keep one version, and rem"
    ):
        read_mapping(path)
