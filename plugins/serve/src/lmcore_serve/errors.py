"""`ApiError`: a request that cannot be answered, with its HTTP status."""

from __future__ import annotations

__all__ = ["ApiError"]


class ApiError(Exception):
    """A request that cannot be answered.

    Attributes:
        status: HTTP status.
        message: Statement of the problem.
        field: Field of the request's body; None: no single one.
        code: Short name of the problem for programs.
        retry_after: Seconds after which the client may try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        field: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.field = field
        self.code = code
        self.retry_after = retry_after
