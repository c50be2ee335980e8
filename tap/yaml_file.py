"""Files that people edit and git merges: YAML as DVC reads it, in bounded memory; what is wrong is said in one sentence."""

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError, DuplicateKeyError, SafeConstructor
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

# After aliases are expanded; the project's own params.yaml has 7 levels and 436 values.
MOST_LEVELS, MOST_VALUES = 50, 100_000
LONGEST_KEY, MOST_BITS = 100, 64
# What ruamel.yaml raises for some files, beside its own errors: for the date 2001-99-99, or after `%YAML 9.9`.
PARSER_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
TEXT, MERGE = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping that a file in YAML 1.2 contains.

    Raises ValueError, which names the line, if the file is missing, has unresolved conflicts of a merge, is not valid YAML, has
    keys that are not text, is not a mapping, or has more levels or values than any params.yaml needs.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    try:
        text = path.read_text("utf-8")
        content = yaml.load(text)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: run inside the project's folder") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): it must be a file that you may read") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 (byte {error.start}): save it in this encoding") from None
    except RecursionError:
        raise ValueError(f"{path} is not valid: its brackets nest deeper than {MOST_LEVELS} levels") from None
    except YAMLError as error:
        require_no_conflict(path, text)
        raise ValueError(_explain(error, path)) from None
    except PARSER_ERRORS as error:
        raise ValueError(f"{path} is not valid YAML: the parser fails with {type(error).__name__} ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must have a mapping at its top level, of the sections that tap/settings.py lists")
    return content


def require_no_conflict(path: Path, text: str, remedy: str = "keep one version, and remove the markers") -> None:
    """Raise ValueError if git marked a conflict of a merge in the text of a file."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("<<<<<<< "):
            raise ValueError(f"{path}, line {number}: two versions conflict since a merge: {remedy}")


class _Constructor(SafeConstructor):
    """Refuses what would need unbounded memory, and says in which line a value is that cannot be read, such as 2001-99-99."""

    def construct_document(self, node: Node) -> Any:
        _measure(node, 1, {})
        return super().construct_document(node)

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int) and value.bit_length() > MOST_BITS:
                raise ValueError(f"a number of more than {MOST_BITS} bits")
            return value
        except PARSER_ERRORS as error:
            raise ConstructorError(problem=f"this value cannot be read ({error})", problem_mark=node.start_mark) from None


def _measure(node: Node, level: int, measured: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Values and levels below a node, each alias counted as what it stands for. Raises ConstructorError on too many."""
    if id(node) not in measured:
        if level > MOST_LEVELS:
            raise ConstructorError(problem=f"values nest deeper than {MOST_LEVELS} levels", problem_mark=node.start_mark)
        children = [] if isinstance(node, ScalarNode) else node.value
        if isinstance(node, MappingNode):
            for key, _ in node.value:
                _check_key(key)
            children = [value for _, value in node.value]
        parts = [_measure(child, level + 1, measured) for child in children]
        values, levels = 1 + sum(values for values, _ in parts), 1 + max((levels for _, levels in parts), default=0)
        if values > MOST_VALUES or levels > MOST_LEVELS:
            problem = f"with its aliases, this stands for more than {MOST_VALUES} values or {MOST_LEVELS} levels"
            raise ConstructorError(problem=problem, problem_mark=node.start_mark)
        measured[id(node)] = values, levels
    return measured[id(node)]


def _check_key(key: Node) -> None:
    if not isinstance(key, ScalarNode) or key.tag not in (TEXT, MERGE):
        raise ConstructorError(problem="this key is not text: rename or quote it", problem_mark=key.start_mark)
    if not key.value.isprintable() or len(key.value) > LONGEST_KEY:
        raise ConstructorError(problem=f"this key is not one of at most {LONGEST_KEY} letters", problem_mark=key.start_mark)


def _explain(error: YAMLError, path: Path) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
    where, problem = f"{path}, line {mark.line + 1}" if mark else f"{path}", " ".join(problem.split())
    if isinstance(error, DuplicateKeyError):
        return f"{where}: {problem.partition(' with value')[0]}: keep one"
    return f"{where} is not valid YAML: {problem if problem.isprintable() else ascii(problem)}"
