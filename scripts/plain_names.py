"""Public names that are no words of the field: a bare participle, an adverb, a preposition, a word of the household.

    python scripts/plain_names.py     exit code 1: there are some, each named with its place

Public functions, methods and classes of both packages are looked at, methods included. ``transfer.taken(4)`` says neither
that something happens nor what comes back: a command is a verb (``take``), an event ``on_taken``, a query names what it
answers (``taken_blocks``). A property or method without parameters that answers ``bool`` may be an adjective, as in
``link.closed``. Only Python's own library is imported.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("operator/src", "sidecar/src")


def word_set(text: str) -> frozenset[str]:
    """What is written with blanks between."""
    return frozenset(text.split())


IRREGULAR = word_set("""
    begun bent bitten blown born borne bought broken brought built burnt caught chosen dealt done drawn driven
    drunk eaten fallen fed felt fled flown forbidden forgotten forgiven fought found frozen given gone grown had
    heard held hidden kept known laid lain left lent lit lost made meant met paid ridden risen rung said seen
    sent shaken shown shrunk slept sold sought spent spoken spun stolen stood stuck sung sunk sworn swept swum swung
    had taken taught thought thrown told torn understood unsaid unsent unseen untold withdrawn withheld won worn woven
    written ate became began blew broke came chose did drew drove fell flew forgot forgave froze gave got grew hid
    knew ran rang rode rose sang sank saw shook spoke stole swam swore threw took tore went woke wore wrote
""")
"""Participles and pasts that do not end in ``-ed``. Those that are a present, too (``put``, ``shut``), are not here."""

SMALL = word_set("""
    about above across after again against ahead alike almost alone along already also although always among anew
    apart around aside at away because before behind below beneath beside besides between beyond both by
    despite down during each either else elsewhere enough even ever everyone everywhere except far few for forth
    from further hence here how if in indeed inside instead into just lately later less little many maybe merely
    more most much near nearly never nobody none nor not nothing now of off often on once only onto or other others
    ours out outside over past per perhaps quite rather same seldom since so some somewhere soon still such than
    that then there therefore these this those though through thus to together too toward towards twice under unless
    until up upon very when whence where whereas whether which while who whole whom whose why with within without
    yet
""")
"""Adverbs, prepositions, conjunctions and pronouns."""

HOUSEHOLD = word_set("""
    bones calm condemn course crew doubt duty farewell goodbye guests hand hear hearing holdings holt home look odds
    room rooms say straight tend trouble tunnel turn ways
""")
"""What says nothing of the machine; the field has another word for each (attempt, slot, capacity, notice, suspect)."""

EXCEPT = word_set("embed exceed feed indeed need proceed seed shed speed succeed weed")
"""Verbs and nouns that end in ``-ed``."""


def kind_of_word(word: str) -> str:
    """Which kind of word ``word`` is, of those that no public name may be alone; empty where it may be one.

    A class of one word is looked at in small letters: ``Told`` as ``told``. Names of several words, ``on_taken`` and
    ``PairEnded``, are well.
    """
    small = word.lower()
    if not small.isalpha() or small[1:] != word[1:]:
        return ""
    if small in IRREGULAR or (small.endswith("ed") and small not in EXCEPT):
        return "participle"
    if small in SMALL:
        return "adverb or preposition"
    return "household word" if small in HOUSEHOLD else ""


def is_adjective(node: ast.FunctionDef | ast.AsyncFunctionDef, *, method: bool) -> bool:
    """Whether a method says of its object that something is so: it answers ``bool`` and has no parameter."""
    plain = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    asks = len(plain) > 1 or node.args.vararg or node.args.kwarg
    return method and not asks and isinstance(node.returns, ast.Name) and node.returns.id == "bool"


def refused_names(body: Sequence[ast.stmt], owner: str = "") -> Iterator[tuple[str, int, str]]:
    """Refused names of a module or class: qualified name, line, kind of word. Names with ``_`` before them are private."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            kind = "" if node.name.startswith("_") else kind_of_word(node.name)
            fits = not isinstance(node, ast.ClassDef) and kind == "participle" and is_adjective(node, method=bool(owner))
            if kind and not fits:
                yield f"{owner}{node.name}", node.lineno, kind
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield from refused_names(node.body, f"{owner}{node.name}.")
        elif isinstance(node, ast.If | ast.Try):
            yield from refused_names([*node.body, *node.orelse], owner)


def scan(root: Path) -> list[str]:
    """Each refused name of both packages, with where it stands and what kind of word it is."""
    found: list[str] = []
    for source in SOURCES:
        for path in sorted((root / source).rglob("*.py")):
            for name, line, kind in refused_names(ast.parse(path.read_text("utf-8")).body):
                where = f"{path.relative_to(root)}:{line}: a {kind}".replace(": a a", ": an a")
                found.append(f"{name}: {where}; a public name is a verb, or a noun with what it is of")
    return found


def main(root: Path = ROOT) -> int:
    """Exit code 1: there are some."""
    found = scan(root)
    print("".join(f"{each}\n" for each in found), end="")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
