"""A PostgreSQL server of one's own for tests: made in a temporary folder, stopped and removed afterwards."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

from penstock.core.errors import Unsupported

_PACKAGE = "Install PostgreSQL's server programs (Debian, Ubuntu: postgresql; Fedora: postgresql-server)."


def _programs() -> Path:
    """The folder of ``initdb``, ``pg_ctl`` and ``postgres``."""
    found = [Path(path).resolve().parent for path in [shutil.which("initdb")] if path]
    config = shutil.which("pg_config")
    if config:
        answer = subprocess.run([config, "--bindir"], capture_output=True, text=True, check=False)
        found.append(Path(answer.stdout.strip()))
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    found += sorted(Path("/usr").glob("pgsql-*/bin"), reverse=True)
    for folder in found:
        if all((folder / name).exists() for name in ("initdb", "pg_ctl", "postgres")):
            return folder
    raise Unsupported(f"No PostgreSQL server programs (initdb, pg_ctl) were found. {_PACKAGE}")


@final
class PostgresServer:
    """A running server. ``url`` connects to its one database by TCP; made by ``postgres_server``."""

    def __init__(self, folder: Path, programs: Path, user: str | None, port: int, *, durable: bool) -> None:
        self._folder = folder
        self._programs = programs
        self._user = user
        self._port = port
        self._fsync = "on" if durable else "off"

    @property
    def url(self) -> str:
        """The URL of its database ``penstock``, by TCP, with a password."""
        return f"postgresql://penstock:s3cret%2Fword@127.0.0.1:{self._port}/penstock"

    def start(self) -> None:
        """Start it and wait until it answers."""
        settings = (
            f"-c listen_addresses=127.0.0.1 -c port={self._port} -c unix_socket_directories={self._folder} "
            f"-c max_connections=50 -c shared_buffers=16MB -c fsync={self._fsync}"
        )
        self._run("pg_ctl", "start", "-w", "-D", "data", "-l", "log", "-o", settings)

    def stop(self, *, mode: str = "immediate") -> None:
        """Stop it: ``immediate`` is a crash, ``fast`` breaks the connections in good order."""
        self._run("pg_ctl", "stop", "-w", "-D", "data", "-m", mode)

    def sql(self, statement: str) -> str:
        """Run a statement as the administrator; returns what psql prints, unaligned."""
        arguments = ["-h", str(self._folder), "-p", str(self._port), "-d", "penstock", "-U", "admin"]
        return self._run("psql", *arguments, "-X", "-A", "-t", "-q", "-v", "ON_ERROR_STOP=1", "-c", statement)

    def _make(self) -> None:
        self._run("initdb", "-D", "data", "-U", "admin", "--auth=trust", "--no-sync", "-E", "UTF8")
        rules = "local all all trust\nhost all all 127.0.0.1/32 scram-sha-256\n"
        (self._folder / "data" / "pg_hba.conf").write_text(rules)
        self.start()
        arguments = ["-h", str(self._folder), "-p", str(self._port), "-U", "admin"]
        self._run("createdb", *arguments, "penstock")
        self.sql("CREATE ROLE penstock LOGIN PASSWORD 's3cret/word'")
        self.sql("GRANT ALL ON SCHEMA public TO penstock; GRANT CREATE ON DATABASE penstock TO penstock")

    def _run(self, program: str, *arguments: str) -> str:
        path = self._programs / program
        command = [str(path if path.exists() else shutil.which(program) or path), *arguments]
        environment = {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C", "HOME": str(self._folder)}
        with tempfile.TemporaryFile() as output:  # not a pipe: the server would keep it open
            done = subprocess.run(
                command,
                cwd=self._folder,
                user=self._user,
                group=None if self._user is None else pwd.getpwnam(self._user).pw_gid,
                extra_groups=None if self._user is None else [],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                check=False,
            )
            output.seek(0)
            text = output.read().decode(errors="replace")
        if done.returncode:
            log = self._folder / "log"
            raise Unsupported(f"{program} failed: {text}\n{log.read_text() if log.exists() else ''}")
        return text.strip()


def _user() -> str | None:
    """Whom to run the server as: oneself, or ``postgres`` for root, which it refuses."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            pwd.getpwnam(name)
        except KeyError:
            continue
        return name
    raise Unsupported("PostgreSQL doesn't run as root and there is no user postgres. " + _PACKAGE)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def postgres_server(*, durable: bool = False) -> Iterator[PostgresServer]:
    """A server with an empty database, for as long as the context lasts.

    Args:
        durable: Whether it syncs to disk. Tests don't pull the plug, benchmarks want it.

    Raises:
        Unsupported: There are no server programs here; says what to install.
    """
    programs, user = _programs(), _user()
    folder = Path(tempfile.mkdtemp(prefix="penstock-pg-"))  # short: a socket's path has 107 bytes
    try:
        if user is not None:
            shutil.chown(folder, user)
        server = PostgresServer(folder, programs, user, _free_port(), durable=durable)
        try:
            server._make()
            yield server
        finally:
            if (folder / "data" / "postmaster.pid").exists():
                server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
