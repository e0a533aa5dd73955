"""Determines the effect of a statement in the binary log on followed tables. Pure: text in, values out.

In row format, row changes are events, and everything else is a statement. Some statements add or remove rows without an
event: TRUNCATE, DROP, RENAME, ALTER TABLE ... EXCHANGE PARTITION. A statement is split into tokens by the rules of the
server's lexer and then parsed. Interpretation fails closed: a statement with an uncertain effect counts as a change of
every followed table. Only a statement that certainly concerns other objects is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Table = tuple[str, str]
"""Database and table."""
Followed = Callable[[str, str], bool]

_WORD = re.compile(r"[0-9A-Za-z_$\u0080-\U0010ffff]+")
_BLANKS = " \t\n\r\f\v\0"
_EXECUTABLE = re.compile(r"/\*M?![0-9]{0,6}")
_LINE_COMMENT = re.compile(r"#|--(?=[\x00-\x20]|$)")
_UNDECODED = "\ufffd"
_ROW_CHANGES = frozenset(
    ("insert", "update", "delete", "replace", "load", "with", "call", "do", "execute", "select", "values", "handler")
)
_HARMLESS = frozenset(
    (
        *("savepoint", "release", "xa", "start", "stop", "set", "grant", "revoke", "flush", "analyze", "optimize"),
        *("repair", "check", "checksum", "install", "uninstall", "change", "reset", "purge", "kill", "lock", "unlock"),
        *("use", "backup", "cache", "signal", "show"),
    )
)
"""First words of statements that change no row of any table."""
_NO_TABLES = frozenset(
    (
        *("view", "index", "trigger", "function", "procedure", "package", "event", "user", "role", "server"),
        *("definer", "algorithm", "sql", "aggregate", "unique", "fulltext", "spatial", "vector", "tablespace"),
        *("logfile", "instance", "prepare", "undo", "catalog", "online"),
    )
)
"""What CREATE, DROP and ALTER name where no table is created, dropped or altered."""
_OTHER_ENGINES = frozenset(
    (
        *("aria", "archive", "blackhole", "columnstore", "connect", "csv", "federated", "federatedx", "heap", "memory"),
        *("merge", "mrg_myisam", "mroonga", "myisam", "oqgraph", "rocksdb", "s3", "sphinx", "spider"),
    )
)


@dataclass(frozen=True, slots=True)
class StatementEffect:
    """The effect of a statement. ``emptied``: tables, as (database, table), that have no rows now. ``refused``: why the
    statement is not supported. ``changed``: tables that rows entered or left without an event; ``refused`` says how."""

    kind: Literal["nothing", "commit", "rollback", "rollback to", "emptied", "changed", "refused"]
    emptied: tuple[Table, ...] = ()
    refused: str = ""
    changed: tuple[Table, ...] = ()


_NOTHING = StatementEffect("nothing")


class Token(NamedTuple):
    kind: Literal["word", "name", "text", "mark"]
    """A word without quotes, a name in quotes, a string, or one other character."""
    text: str

    def is_word(self, *keywords: str) -> bool:
        return self.kind == "word" and self.text.lower() in keywords


class _Uncertain(Exception):
    """The statement cannot be parsed with certainty."""


def interpret(
    statement: str,
    database: str,
    followed: Followed,
    tables: Collection[Table],
    *,
    ansi_quotes: bool = False,
    backslash_escapes: bool = True,
    fold_case: bool = False,
) -> StatementEffect:
    """The effect of ``statement``. ``database``: the default database. ``tables``: the followed tables. ``fold_case``:
    the server compares database and table names case-insensitively (lower_case_table_names is not 0)."""
    tokens: list[Token] = []
    try:
        tokens = tokenize(statement, ansi_quotes=ansi_quotes, backslash_escapes=backslash_escapes)
        return _Interpreter(statement, tokens, database, followed, tables, fold_case).effect()
    except _Uncertain as uncertain:
        refused = f"the statement {_beginning(tokens)} ... {uncertain}"
        followed_tables = tuple(table for table in sorted(tables) if followed(*table))
        return (
            StatementEffect("changed", refused=refused, changed=followed_tables)
            if followed_tables
            else StatementEffect("refused", refused=refused)
        )


def tokenize(statement: str, *, ansi_quotes: bool = False, backslash_escapes: bool = True) -> list[Token]:
    """Splits a statement into tokens, without comments. The content of an executable comment is included: the server
    changes a comment that it did not execute into an ordinary one before it writes the statement to the log."""
    tokens: list[Token] = []
    at, end, in_executable = 0, len(statement), False
    while at < end:
        char = statement[at]
        if char in _BLANKS:
            at += 1
        elif match := _EXECUTABLE.match(statement, at):
            if in_executable:
                raise _Uncertain("has an executable comment inside another one")
            in_executable, at = True, match.end()
        elif in_executable and statement.startswith("*/", at):
            in_executable, at = False, at + 2
        elif statement.startswith("/*", at):
            closed = statement.find("*/", at + 2)
            if closed < 0:
                raise _Uncertain("has a comment without an end")
            at = closed + 2
        elif _LINE_COMMENT.match(statement, at):
            newline = statement.find("\n", at)
            at = end if newline < 0 else newline + 1
        elif char == "`" or (char == '"' and ansi_quotes):
            text, at = _quoted(statement, at, escapes=False)
            tokens.append(Token("name", text))
        elif char in "'\"":
            text, at = _quoted(statement, at, escapes=backslash_escapes)
            tokens.append(Token("text", text))
        elif match := _WORD.match(statement, at):
            tokens.append(Token("word", match[0]))
            at = match.end()
        else:
            tokens.append(Token("mark", char))
            at += 1
    if in_executable:
        raise _Uncertain("has an executable comment without an end")
    return tokens


def _quoted(statement: str, start: int, *, escapes: bool) -> tuple[str, int]:
    """The text between quotes, and the index after the closing quote."""
    quote, at, parts = statement[start], start + 1, []
    while at < len(statement):
        char = statement[at]
        if char in "\\`" and statement[at - 1] == _UNDECODED:
            raise _Uncertain("has a character set in which quotes are ambiguous")
        if char == "\\" and escapes:
            parts.append(statement[at : at + 2])
            at += 2
        elif char != quote:
            parts.append(char)
            at += 1
        elif statement.startswith(quote, at + 1):
            parts.append(quote)
            at += 2
        else:
            return "".join(parts), at + 1
    raise _Uncertain("has a quote without an end")


class _Interpreter:
    """Parses one statement from left to right."""

    def __init__(
        self,
        statement: str,
        tokens: list[Token],
        database: str,
        followed: Followed,
        tables: Collection[Table],
        fold_case: bool,
    ) -> None:
        self._statement = statement
        self._tokens = tokens
        self._at = 0
        self._database = database
        self._followed = followed
        self._tables = tables
        self._fold_case = fold_case
        while tokens and tokens[-1] == Token("mark", ";"):
            tokens.pop()

    def effect(self) -> StatementEffect:
        if not self._tokens:
            return _NOTHING
        if self._take("set"):
            if not self._take("statement"):
                return _NOTHING
            self._skip_to("for")
        if self._take("commit"):
            return StatementEffect("commit")
        if self._take("rollback"):
            self._take("work")
            return StatementEffect("rollback to" if self._take("to") else "rollback")
        if self._take("begin"):
            self._take("work")
            self._expect_end("begins a block of statements")
            return _NOTHING
        if self._is(*_ROW_CHANGES):
            return self._row_change()
        if self._take("truncate"):
            return self._truncate()
        if self._take("drop"):
            return self._drop()
        if self._take("create"):
            return self._create()
        if self._take("rename"):
            return self._rename()
        if self._take("alter"):
            return self._alter()
        if self._take(*_HARMLESS):
            return _NOTHING
        raise _Uncertain("is not supported by this version")

    # --- statements -------------------------------------------------------------------------------------------------

    def _row_change(self) -> StatementEffect:
        if self._take("delete") and self._statement.endswith("/* generated by server */") and self._take("from"):
            table = self._table()  # the server empties a table in memory after a restart
            if self._at == len(self._tokens) and not self._followed(*table):
                return _NOTHING
        why = "was logged as a statement, not as rows. Set `binlog_format = ROW` for every session"
        return StatementEffect("refused", refused=f"the statement {_beginning(self._tokens)} ... {why}")

    def _truncate(self) -> StatementEffect:
        self._take("table")
        table = self._table()
        self._take_wait()
        self._expect_end("truncates a table with unknown syntax")
        return self._emptied([table])

    def _drop(self) -> StatementEffect:
        if self._take("temporary"):
            return _NOTHING
        if self._take("table", "tables"):
            self._take_if_exists()
            tables = [self._table()]
            while self._take_mark(","):
                tables.append(self._table())
            self._take_wait()
            self._take("restrict", "cascade")
            self._expect_end("drops tables with unknown syntax")
            return self._emptied(tables)
        if self._take("database", "schema"):
            self._take_if_exists()
            return self._database_dropped(self._name())
        if self._take("sequence", *_NO_TABLES):
            return _NOTHING
        raise _Uncertain("drops an object of an unknown type")

    def _create(self) -> StatementEffect:
        if not self._take("or"):
            if self._take("temporary", "table", "database", "schema", "sequence", *_NO_TABLES):
                return _NOTHING
            raise _Uncertain("creates an object of an unknown type")
        if not self._take("replace"):
            raise _Uncertain("has unknown syntax")
        if self._take("temporary"):
            return _NOTHING
        if self._take("table"):
            return self._emptied([self._table()])
        if self._take("database", "schema"):
            return self._database_dropped(self._name())
        if self._take("sequence"):
            table = self._table()
            return self._emptied([table] if table in self._tables else [])
        if self._take(*_NO_TABLES):
            return _NOTHING
        raise _Uncertain("replaces an object of an unknown type")

    def _rename(self) -> StatementEffect:
        if self._take("user"):
            return _NOTHING
        if not self._take("table", "tables"):
            raise _Uncertain("renames an object of an unknown type")
        self._take_if_exists()
        renamed = []
        while True:
            renamed.append(self._table())
            self._take_wait()
            if not self._take("to"):
                raise _Uncertain("renames tables with unknown syntax")
            renamed.append(self._table())
            if not self._take_mark(","):
                break
        self._expect_end("renames tables with unknown syntax")
        return self._changed("replaced a table by renaming", renamed)

    def _alter(self) -> StatementEffect:
        ignoring = False
        while self._is("online", "ignore"):
            ignoring = ignoring or self._is("ignore")
            self._at += 1
        if not self._take("table"):
            if self._take("database", "schema"):
                if any(token.is_word("upgrade") for token in self._tokens[self._at :]):
                    raise _Uncertain("renames a database")
                return _NOTHING
            if self._take("sequence", *_NO_TABLES):
                return _NOTHING
            raise _Uncertain("alters an object of an unknown type")
        self._take_if_exists()
        table = self._table()
        self._take_wait()
        return self._altered(table, ignoring)

    def _altered(self, table: Table, ignoring: bool) -> StatementEffect:
        """The effect of ALTER TABLE's clauses. Skips words in parentheses, and words after a dot, which are names."""
        renamed: list[Table] = []
        exchanged: list[Table] = []
        why = "removed the rows that do not fit (IGNORE)" if ignoring else ""
        depth = 0
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            self._at += 1
            if token.kind == "mark":
                depth += {"(": 1, ")": -1}.get(token.text, 0)
                if token.text == ".":
                    self._at += 1
                continue
            if depth or token.kind != "word":
                continue
            if token.is_word("rename") and not self._is("column", "index", "key", "constraint"):
                if not self._take_mark("="):
                    self._take("to", "as")
                renamed.append(self._table())
            elif token.is_word("engine"):
                if self._moves_to_another_engine():
                    why = "moved the table to another engine"
            elif token.is_word("truncate", "drop") and self._is("partition"):
                why = "removes rows without an event for each"
            elif token.is_word("exchange", "convert") and self._is("partition", "table"):
                why = "removes or adds rows without an event for each"
                exchanged += self._exchanged_table()
            elif token.is_word("discard", "import") and self._is("tablespace", "partition"):
                why = "removes or adds rows without an event for each"
        if any(name != table for name in renamed):
            return self._changed("replaced a table by renaming", [table, *renamed, *exchanged])
        return self._changed(why, [table, *exchanged]) if why else _NOTHING

    def _exchanged_table(self) -> list[Table]:
        """The table t in EXCHANGE PARTITION p WITH TABLE t, CONVERT PARTITION p TO TABLE t and CONVERT TABLE t TO
        PARTITION p."""
        if self._take("table"):
            return [self._table()]
        self._take("partition")
        self._name()
        if not self._take("with", "to") or not self._take("table"):
            raise _Uncertain("moves a partition with unknown syntax")
        return [self._table()]

    # --- effects ----------------------------------------------------------------------------------------------------

    def _emptied(self, tables: Sequence[Table]) -> StatementEffect:
        emptied = tuple(dict.fromkeys(table for table in tables if self._followed(*table)))
        return StatementEffect("emptied", emptied) if emptied else _NOTHING

    def _changed(self, why: str, tables: Sequence[Table]) -> StatementEffect:
        changed = tuple(dict.fromkeys(table for table in tables if self._followed(*table)))
        refused = f"the statement {_beginning(self._tokens)} ... {why}"
        return StatementEffect("changed", refused=refused, changed=changed) if changed else _NOTHING

    def _database_dropped(self, database: str) -> StatementEffect:
        return self._emptied([table for table in sorted(self._tables) if self._folded(table[0]) == database])

    # --- tokens -----------------------------------------------------------------------------------------------------

    def _is(self, *keywords: str) -> bool:
        return self._at < len(self._tokens) and self._tokens[self._at].is_word(*keywords)

    def _moves_to_another_engine(self) -> bool:
        """Parses the text after ENGINE, which may also be a column's name."""
        assigned = self._take_mark("=")
        engine = self._tokens[self._at].text.lower() if self._at < len(self._tokens) else ""
        return engine != "innodb" if assigned else engine in _OTHER_ENGINES

    def _take(self, *keywords: str) -> bool:
        if not self._is(*keywords):
            return False
        self._at += 1
        return True

    def _take_mark(self, mark: str) -> bool:
        if self._at >= len(self._tokens) or self._tokens[self._at] != Token("mark", mark):
            return False
        self._at += 1
        return True

    def _take_if_exists(self) -> None:
        if self._take("if"):
            self._take("not")
            if not self._take("exists"):
                raise _Uncertain("has unknown syntax")

    def _take_wait(self) -> None:
        if self._take("wait"):
            self._at += 1
        else:
            self._take("nowait")

    def _skip_to(self, keyword: str) -> None:
        depth = 0
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            depth += {"(": 1, ")": -1}.get(token.text, 0) if token.kind == "mark" else 0
            self._at += 1
            if not depth and token.is_word(keyword):
                return
        raise _Uncertain("has unknown syntax")

    def _expect_end(self, why: str) -> None:
        if self._at < len(self._tokens):
            raise _Uncertain(why)

    def _name(self) -> str:
        if self._at < len(self._tokens):
            token = self._tokens[self._at]
            if token.kind in ("word", "name") and token.text and _UNDECODED not in token.text:
                self._at += 1
                return self._folded(token.text)
        raise _Uncertain("has an unknown form of a table's name")

    def _table(self) -> Table:
        first = self._name()
        table = (first, self._name()) if self._take_mark(".") else (self._folded(self._database), first)
        if not self._fold_case:
            return table
        spelled = [candidate for candidate in self._tables if (candidate[0].lower(), candidate[1].lower()) == table]
        return spelled[0] if spelled else table

    def _folded(self, name: str) -> str:
        return name.lower() if self._fold_case else name


def _beginning(tokens: Sequence[Token]) -> str:
    """The start of a statement for messages, up to the first value, because values may be personal data."""
    prefix = []
    for token in tokens[:6]:
        if token.kind == "text" or (token.kind == "mark" and token.text != ".") or token.text[:1].isdigit():
            break
        prefix.append(token.text)
    return repr(" ".join(prefix).replace(" . ", ".")[:60])
