"""Each kind of error reply has an error class, and every message says what to do."""

from __future__ import annotations

import pickle

import pytest

from millstream import errors
from millstream.broker.failures import TRANSIENT, code_of, typed_error
from millstream.wire.commands import ErrorReply


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("NOAUTH Authentication required.", errors.AuthenticationFailed),
        ("ERR Protocol error: unauthenticated multibulk length", errors.AuthenticationFailed),
        ("WRONGPASS invalid username-password pair or user is disabled.", errors.AuthenticationFailed),
        ("NOPERM this user has no permissions to run the 'xadd' command", errors.PermissionDenied),
        ("OOM command not allowed when used memory > 'maxmemory'.", errors.OutOfMemory),
        ("LOADING Redis is loading the dataset in memory", errors.ServerLoading),
        ("READONLY You can't write against a read only replica.", errors.ReadOnlyReplica),
        ("NOREPLICAS Not enough good replicas to write.", errors.ServerError),
        ("NOGROUP No such key 's' or consumer group 'g'", errors.NoSuchGroup),
        ("BUSYGROUP Consumer Group name already exists", errors.GroupExists),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", errors.WrongKeyType),
        ("ERR The ID specified in XADD is equal or smaller than the target stream top item", errors.IdTooSmall),
        ("ERR The ID specified in XADD must be greater than 0-0", errors.IdTooSmall),
        ("ERR The ID specified in XSETID is smaller than the target stream top item", errors.IdTooSmall),
        ("ERR no such key", errors.NoSuchStream),
        ("CROSSSLOT Keys in request don't hash to the same slot", errors.InvalidArgument),
        ("ERR whatever", errors.ServerError),
        ("NEWCODE of a later version", errors.ServerError),
    ],
)
def test_error_reply_becomes_typed_error(text: str, kind: type[errors.MillstreamError]) -> None:
    error = typed_error(ErrorReply(text))

    assert type(error) is kind
    assert text.rstrip(".") in str(error)


@pytest.mark.parametrize("code", sorted(TRANSIENT))
def test_transient_errors_are_retryable(code: str) -> None:
    error = typed_error(ErrorReply(f"{code} for now"))

    assert error.retryable
    assert pickle.loads(pickle.dumps(error)).retryable
    assert not typed_error(ErrorReply("ERR whatever")).retryable


def test_rejected_transaction_reports_its_cause() -> None:
    error = ErrorReply(
        "EXECABORT Transaction discarded because of: OOM command not allowed when used memory > 'maxmemory'."
    )

    assert code_of(error) == "OOM"
    assert type(typed_error(error)) is errors.OutOfMemory


def test_position_in_a_script_is_removed_from_errors() -> None:
    error = typed_error(ErrorReply("WRONGTYPE Operation against a key script: 0abc, on @user_script:10."))

    assert "user_script" not in str(error)
