"""The files of a plan as a file system of fsspec, which only reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO

from fsspec import AbstractFileSystem

from reshard.core.run.reading import opened, reader_of

if TYPE_CHECKING:
    from reshard.core.plan.plan import Plan


class PlanFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The files that a plan would write; nothing is written."""

    protocol = "reshard-plan"
    cachable = False

    def __init__(self, plan: Plan, **options: Any) -> None:
        super().__init__(**options)
        self._plan = plan
        self._reader = reader_of(plan)
        self._below: dict[str, dict[str, str]] = {"": {}}
        for path in self._reader.sizes:
            name = path
            while name:
                above = name.rpartition("/")[0]
                self._below.setdefault(above, {})[name] = "file" if name == path else "directory"
                name = above

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(path).removeprefix(f"{cls.protocol}://").strip("/")

    def info(self, path: str, **_options: Any) -> dict[str, Any]:
        """Return the size and the kind of a path."""
        path = self._strip_protocol(path)
        if path in self._reader.sizes:
            return {"name": path, "size": self._reader.sizes[path], "type": "file"}
        if path in self._below:
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **_options: Any) -> list[Any]:
        """Return what is in a directory."""
        path = self._strip_protocol(path)
        names = list(self._below[path]) if path in self._below else [self.info(path)["name"]]
        return [self.info(name) for name in names] if detail else names

    def _open(self, path: str, mode: str = "rb", **_options: Any) -> BinaryIO:
        if mode != "rb":
            raise OSError("the files of a plan are only read")
        self.info(path)
        return opened(self._reader, self._strip_protocol(path))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_options: Any) -> bytes:
        """Return the bytes of a file from `start` to `end`, which count from the end of the file if negative."""
        size = self.info(path)["size"]
        first, last, _ = slice(start, end).indices(size)
        return self._reader.read(self._strip_protocol(path), first, max(last - first, 0))

    def __reduce__(self) -> tuple[Any, ...]:
        return PlanFileSystem, (self._plan,)
