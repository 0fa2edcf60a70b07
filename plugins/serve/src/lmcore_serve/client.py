"""`Client`: text from a server of `lmcore serve`, or of Megatron-LM, by Python's own HTTP."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from lmcore.base.errors import ConfigError, LmcoreError

__all__ = ["Client", "ClientError"]

_MAX_REPLY = 64 * 2**20
_MAX_LINE = 4 * 2**20
_MEGATRON_NAMES = {"max_tokens": "tokens_to_generate", "seed": "random_seed"}


class ClientError(LmcoreError):
    """A server that does not answer, or answers with an error.

    Attributes:
        code: Short name of the problem, if the server gave one.
    """

    code: str | None = None


class Client:
    """Client of one server."""

    def __init__(self, address: str, key: str | None = None, timeout: float = 600.0) -> None:
        """Check the address.

        Args:
            address: HOST:PORT, or a URL.
            key: API key.
            timeout: Seconds to wait for the next part of a reply.

        Raises:
            ConfigError: The address is none.
        """
        url = address if "://" in address else f"http://{address}"
        try:
            parts = urlsplit(url)
            valid = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
        except ValueError:
            valid = False
        if not valid:
            raise ConfigError(
                f"`{address}` is not an address of a server", hint="write it as localhost:5000"
            )
        self.url = url.rstrip("/").removesuffix("/api").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._timeout = timeout
        # A redirect would take the key and the text elsewhere; a proxy of the environment is used.
        self._opener = urllib.request.build_opener(_NoRedirect)

    def complete(
        self, prompt: str, settings: Mapping[str, Any]
    ) -> Generator[str, None, str | None]:
        """Return the continuation of a text in parts, and its `finish_reason` as the last value.

        Args:
            prompt: Text to continue.
            settings: Further fields of the request, named as for `/v1/completions`.

        Raises:
            ClientError: The server does not answer, or refuses the request.
        """
        body, end = {"prompt": prompt, **settings}, None
        try:
            for choice in self._choices("/v1/completions", body):
                yield str(choice.get("text") or "")
                end = choice.get("finish_reason") or end
        except _NoPathError:
            yield self._from_megatron(prompt, settings)
        return end

    def chat(
        self, messages: Sequence[Mapping[str, str]], settings: Mapping[str, Any]
    ) -> Generator[str, None, str | None]:
        """Return the answer in a conversation in parts, and its `finish_reason` as the last value.

        Args:
            messages: Messages with `role` and `content`.
            settings: Further fields of the request.

        Raises:
            ClientError: The server does not answer, or refuses the request.
        """
        body, end = {"messages": list(messages), **settings}, None
        try:
            for choice in self._choices("/v1/chat/completions", body):
                delta = choice.get("delta")
                yield str(delta.get("content") or "") if isinstance(delta, dict) else ""
                end = choice.get("finish_reason") or end
        except _NoPathError:
            raise ClientError(f"the server at {self.url} does not chat") from None
        return end

    def _from_megatron(self, prompt: str, settings: Mapping[str, Any]) -> str:
        """Return the continuation of a text by Megatron-LM's interface."""
        refused = sorted({"model", "stop"} & set(settings))
        if refused:
            raise ClientError(f"the server at {self.url} does not take `{refused[0]}`")
        fields = {_MEGATRON_NAMES.get(name, name): value for name, value in settings.items()}
        if fields.get("temperature") == 0:
            fields |= {"temperature": 1.0, "top_k": 1}
        body = {"prompts": [prompt], **fields}
        with self._opened("/api", body, "PUT") as reply:
            if _kind(reply) == "text/html":
                raise self._another_server(reply)
            content = self._json(reply.read(_MAX_REPLY))
        try:
            text = content["text"][0]
        except (KeyError, IndexError, TypeError):
            # Megatron-LM replies some errors as a text with the status 200.
            raise ClientError("the server refused the request", why=str(content)[:500]) from None
        return str(text).removeprefix(prompt)

    def _choices(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Return the first choice of each event of a stream that has one."""
        with self._opened(path, {**body, "stream": True}, "POST") as reply:
            if _kind(reply) != "text/event-stream":
                raise self._another_server(reply)
            while True:
                try:
                    line = reply.readline(_MAX_LINE)
                except (OSError, http.client.HTTPException) as error:
                    raise ClientError(
                        "the connection broke within the answer", why=str(error)
                    ) from None
                if not line:
                    raise ClientError("the connection ended within the answer")
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    return
                event = self._json(line[len(b"data: ") :])
                if not isinstance(event, dict):
                    raise self._another_server(reply)
                if "error" in event:
                    raise ClientError("the answer broke off", why=_message(event))
                choices = event.get("choices")
                if isinstance(choices, list) and choices and isinstance(choices[0], dict):
                    yield choices[0]

    def _opened(self, path: str, body: Mapping[str, Any], method: str) -> Any:
        request = urllib.request.Request(  # noqa: S310 - the scheme was checked
            self.url + path, json.dumps(body).encode(), self._headers, method=method
        )
        try:
            return self._opener.open(request, timeout=self._timeout)
        except urllib.error.HTTPError as error:
            with error:
                content = error.read(_MAX_REPLY)
            found = self._json(content, else_text=True)
            ours = isinstance(found, dict) and isinstance(found.get("error"), dict)
            if error.code in {404, 405} and not (ours and found["error"].get("code")):
                if path != "/api":
                    raise _NoPathError from None
                raise self._another_server(error) from None
            if not ours and (error.code == HTTPStatus.NOT_IMPLEMENTED or 300 <= error.code < 400):
                raise self._another_server(error) from None
            if _kind(error) == "text/html":
                if error.code < 500:
                    raise self._another_server(error) from None
                # Megatron-LM's server, or a proxy.
                found = f"status {error.code} {error.reason}"
            refusal = ClientError(
                "the server refused the request",
                why=_message(found),
                hint="give the key by `--api-key-file`" if error.code == 401 else None,
            )
            refusal.code = found["error"].get("code") if ours else None
            raise refusal from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            why = reason.strerror if isinstance(reason, OSError) else None
            if isinstance(reason, ssl.SSLError):
                why = str(reason)
            raise ClientError(
                f"no answer from {self.url}",
                why=why or str(reason) or type(reason).__name__,
                hint="start a server by `lmcore serve --load RUN`, and give its HOST:PORT",
            ) from None

    def _another_server(
        self, reply: http.client.HTTPResponse | urllib.error.HTTPError
    ) -> ClientError:
        """Return the error for a reply that no server of text gives."""
        place, kind = reply.headers.get("Location"), _kind(reply)
        more = f", a redirect to {place[:200]}" if place else f", {kind}" if kind else ""
        return ClientError(
            f"{self.url} is not a server of lmcore or Megatron-LM",
            why=f"it replied with the status {reply.status}{more}",
            hint="check host, port and path",
        )

    def _json(self, content: bytes, *, else_text: bool = False) -> Any:
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            if else_text:
                return content.decode(errors="replace")
            raise ClientError(
                f"the reply of {self.url} is not JSON", why=content[:200].decode(errors="replace")
            ) from None


class _NoPathError(Exception):
    """A server without this interface."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refusal of redirects."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow none."""


def _kind(reply: http.client.HTTPResponse | urllib.error.HTTPError) -> str:
    """Return the media type of a reply; empty if it has none."""
    return str(reply.headers.get("Content-Type", "")).partition(";")[0].strip().lower()


def _message(found: Any) -> str:
    """Return the message of an error in any server's form."""
    if isinstance(found, dict) and isinstance(found.get("error"), dict):
        return str(found["error"].get("message", ""))
    if isinstance(found, dict) and isinstance(found.get("message"), str):
        return str(found["message"])[:500]
    return str(found).strip().partition("\n")[0][:500]
