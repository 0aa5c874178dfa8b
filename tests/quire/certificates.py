"""Certificates for servers of tests, and whether a server can use one."""

import shutil
import subprocess
from pathlib import Path

import pytest

#: What a server says that was built without TLS: it does not know of it, or says so.
NO_TLS = ("TLS support", ">>> 'tls-port")


def make_certificate(folder: Path) -> None:
    """Writes cert.pem, which signs itself, and key.pem; skips without openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(command, check=True, capture_output=True)


def files_of(folder: Path) -> list[str]:
    """The options of a server that has the certificate in this folder."""
    files = [(name, folder / f"{name}.pem") for name in ("cert", "key")]
    return [word for name, file in files for word in (f"--tls-{name}-file", str(file))]


def has_tls(program: str) -> bool:
    """Whether a server was built with TLS: it is given a certificate that does not exist."""
    command = [program, "--port", "0", "--tls-port", "1", *files_of(Path("/does/not/exist"))]
    said = subprocess.run(command, capture_output=True, text=True, timeout=10)
    assert said.returncode, "a server without its certificate ends"
    return not any(text in said.stdout + said.stderr for text in NO_TLS)
