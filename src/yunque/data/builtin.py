"""The corpus every machine has: the Python standard library's sources, docstrings and reference topics."""

import ast
import fnmatch
import io
import sysconfig
import tokenize
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from yunque.core.errors import DataError
from yunque.data.documents import Document
from yunque.data.report import ReadLog, ReadReport
from yunque.data.source import SourceConfig

Content = Literal["code", "docs"]

#: Installed packages are never part of the corpus, whatever the settings say.
_FOREIGN = ("site-packages", "dist-packages", "__pycache__")
_TESTS = ("test", "tests", "idle_test")
_TOPICS = "pydoc_data/topics.py"


@dataclass(frozen=True, kw_only=True)
class BuiltinSource(SourceConfig):
    """Settings of the built-in corpus.

    ``content``: "code" gives each module's source; "docs" gives each module's documentation strings as one
    text, and the topics of the language reference that ``help()`` shows. ``exclude`` holds patterns for
    single parts of a module's path; by default what reads as tables or as a copy: character maps, IDLE, the
    old 2-to-3 grammar.
    """

    kind: Literal["builtin"] = "builtin"
    content: tuple[Content, ...] = ("code", "docs")
    include_tests: bool = False
    exclude: tuple[str, ...] = ("encodings", "idlelib", "lib2to3", "pydoc_data", "_sysconfigdata*")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.content:
            raise ValueError("content is empty; valid: code, docs")


def read_builtin(settings: BuiltinSource, log: ReadLog, root: Path | None = None) -> Iterator[Document]:
    """The corpus by file name. ``root`` is a library's folder or zip; by default, this interpreter's.

    A file's documents share its name as their key, so that a file is in one split; each topic is its own key.
    """
    library = _Library(root or _own_library())
    for name in _selected(library.names(), settings):
        source = _decoded(library.read(name), name, log)
        if source is None:
            continue
        log.file()
        if "code" in settings.content:
            yield _counted(Document(source, f"python:{name}", name), log)
        if "docs" in settings.content:
            text = _docs_of(source, name, log)
            if text:
                yield _counted(Document(text, f"python:{name}:docs", name), log)
    if "docs" in settings.content and _TOPICS in library.names():
        log.file()
        yield from _topics(library.read(_TOPICS), log)


def builtin_size(settings: BuiltinSource, root: Path | None = None) -> ReadReport:
    """How much the corpus holds, both splits together: files, documents, bytes. Takes a few seconds."""
    log = ReadLog()
    for _ in read_builtin(settings, log, root):
        pass
    return log.report()


class _Library:
    """Python files by name (relative, with forward slashes) in a folder or a zip archive."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._archive = zipfile.ZipFile(root) if root.is_file() else None

    def names(self) -> list[str]:
        if self._archive is not None:
            found = [name for name in self._archive.namelist() if name.endswith(".py")]
        else:
            found = [path.relative_to(self.root).as_posix() for path in _python_files(self.root)]
        return sorted(found, key=lambda name: name.split("/"))

    def read(self, name: str) -> bytes:
        return self._archive.read(name) if self._archive is not None else (self.root / name).read_bytes()


def _own_library() -> Path:
    """The folder, or the zip of an embedded interpreter, that holds this interpreter's library as sources."""
    folder = Path(sysconfig.get_path("stdlib"))
    packed = folder.parent / f"python{sysconfig.get_config_var('py_version_nodot')}.zip"
    if (folder / "argparse.py").is_file():
        return folder
    for archive in (packed, folder.with_suffix(".zip"), folder):
        if archive.is_file() and "argparse.py" in zipfile.ZipFile(archive).namelist():
            return archive
    raise DataError(
        f"{folder}: this Python carries no library sources; use a source of kind 'code' with a path instead"
    )


def _python_files(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name in _FOREIGN or path.is_symlink():
            continue
        if path.is_dir():
            yield from _python_files(path)
        elif path.suffix == ".py":
            yield path


def _selected(names: Iterable[str], settings: BuiltinSource) -> Iterator[str]:
    unwanted = (*_FOREIGN, *settings.exclude, *(() if settings.include_tests else _TESTS))
    for name in names:
        parts = PurePosixPath(name).parts
        if not any(fnmatch.fnmatchcase(part, pattern) for part in parts for pattern in unwanted):
            yield name


def _decoded(content: bytes, name: str, log: ReadLog) -> str | None:
    """The text of a Python file in the encoding it declares; None, with the reason logged, without one."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        text = content.decode(encoding).replace("\r\n", "\n")
    except (SyntaxError, UnicodeDecodeError) as error:
        log.problem(f"python:{name}", None, "not decodable", str(error))
        return None
    if not text.strip():  # the mark of a package, not a fault
        log.ignore()
        return None
    if "\0" in text:
        log.problem(f"python:{name}", None, "NUL character")
        return None
    return text


def _docs_of(source: str, name: str, log: ReadLog) -> str:
    """The documentation strings of a module, each under the signature it documents; "" without any."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in other people's strings
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        log.problem(f"python:{name}", getattr(error, "lineno", None), "not parsable", str(error))
        return ""
    own, below = ast.get_docstring(tree), list(_docs_below(tree, ""))
    if not own and not below:
        return ""
    title = f"module {name.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}"
    return "\n\n".join([f"{title}\n\n{own}" if own else title, *below]) + "\n"


def _docs_below(owner: ast.AST, prefix: str) -> Iterator[str]:
    for node in ast.iter_child_nodes(owner):
        if isinstance(node, ast.ClassDef):
            title = f"class {prefix}{node.name}"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            title = f"{prefix}{node.name}({ast.unparse(node.args)})"
        else:
            continue
        if text := ast.get_docstring(node):
            yield f"{title}\n\n{text}"
        yield from _docs_below(node, f"{prefix}{node.name}.")


def _topics(content: bytes, log: ReadLog) -> Iterator[Document]:
    """The language reference's topics: the values of the one dictionary that the module assigns."""
    try:
        tree = ast.parse(content)
        assigned = next(node.value for node in tree.body if isinstance(node, ast.Assign))
        topics = ast.literal_eval(assigned)
    except (SyntaxError, ValueError, StopIteration) as error:
        log.problem(f"python:{_TOPICS}", None, "not parsable", str(error))
        return
    for topic, text in sorted(topics.items()):
        yield _counted(Document(text, f"python:{_TOPICS}:{topic}", f"{_TOPICS}#{topic}"), log)


def _counted(document: Document, log: ReadLog) -> Document:
    log.document(len(document.text.encode()))
    return document
