"""Keys for connections between machines, one command each; needs the package `cryptography`.

    python -m torchbeast.keys authority                  signs all others; its key stays with you
    python -m torchbeast.keys learner learner 192.0.2.7  for the learner, with its names
    python -m torchbeast.keys worker gpu-box-3           for a machine that dials in
    python -m torchbeast.keys server hostA 192.0.2.8     for environments that listen
    python -m torchbeast.keys token                      the secret that all of them share

Everything is kept in --folder. Private keys and the token can be read by their owner only. A
certificate states its purpose, so that a worker's cannot pose as a learner's; docs/remote.md has
the flags that take them. All but the authority may be replaced while a learner runs.
"""

import datetime
import ipaddress
import os
import re
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from libtorchbeast.rpc.certificates import WORKER_URI
from torchbeast.errors import UsageError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

AUTHORITY = "torchbeast authority"
CLOCK_SKEW = datetime.timedelta(hours=1)  # between machines
WORKER_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
RESERVED = ("ca", "learner", "token")  # names of other files


@dataclass(frozen=True)
class Where:
    """Where a command writes its files, and for how long they are valid."""

    folder: Path = Path("keys")
    """The folder with the authority and all that it signs."""
    days: int = 365
    """Days for which a certificate is valid."""
    replace: bool = False
    """Replace files that exist already."""


Options = Annotated[Where, tyro.conf.arg(name="")]
Names = tyro.conf.Positional[tuple[str, ...]]


def authority(where: Options = Where(days=3650)) -> None:  # noqa: B008 (frozen)
    """Make an authority. Keep ca.key to yourself: with it, anyone can make certificates."""
    key = _new_key()
    usage = {"key_cert_sign": True, "crl_sign": True}
    builder = _builder(AUTHORITY, where.days, usage, is_ca=True)
    certificate = builder.public_key(key.public_key()).issuer_name(_name(AUTHORITY))
    _write_pair(where, "ca", _sign(certificate, key, key), key)
    print("All machines need ca.pem; ca.key stays here.")


def learner(names: Names, where: Options = Where()) -> None:  # noqa: B008
    """Make the learner's certificate, for the host names and addresses at which it is reached."""
    _issue(where, "learner", "learner", _alternatives(names), ("serverAuth", "clientAuth"))
    print(f"The learner listens with {_flags(where, 'learner')}.")


def worker(name: tyro.conf.Positional[str], where: Options = Where()) -> None:  # noqa: B008
    """Make the certificate of a machine whose environments dial in, with its name in it."""
    if not WORKER_NAME.fullmatch(name) or name in RESERVED:
        raise UsageError(
            "A worker's name has at most 64 letters, digits, dots, - and _, and is not one of "
            f"{', '.join(RESERVED)}; got {name!r}."
        )
    from cryptography import x509

    alternatives = [x509.UniformResourceIdentifier(WORKER_URI + name)]
    _issue(where, name, name, alternatives, ("clientAuth",))
    authority = where.folder / "ca.pem"
    print(f"Its environments dial with --tls_ca {authority} {_flags(where, name)}.")


def server(names: Names, where: Options = Where()) -> None:  # noqa: B008
    """Make the certificate of environments that listen, for their host names and addresses."""
    alternatives = _alternatives(names)
    name = re.sub(r"[^\w.-]", "-", names[0])
    if name in RESERVED:
        raise UsageError(f"A server is not called {', '.join(RESERVED)}, got {name}.")
    _issue(where, name, names[0], alternatives, ("serverAuth",))
    print(f"The environments listen with {_flags(where, name)}.")


def token(where: Options = Where()) -> None:  # noqa: B008
    """Make the token: the secret that both ends share."""
    path = _vacant(where, "token")
    write_private(path, secrets.token_hex(32).encode() + b"\n")
    print(f"Wrote {path}; both ends take it with --token_file {path}.")


def main(args: list[str] | None = None) -> int:
    try:
        _require_cryptography()
        commands = {f.__name__: f for f in (authority, learner, worker, server, token)}
        tyro.extras.subcommand_cli_from_dict(commands, args=args, description=__doc__)
        return 0
    except (UsageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def write_private(path: Path, data: bytes) -> None:
    """Write a file atomically that only its owner can read."""
    _write(path, data, 0o600)


# ------------------------------------------------------------------------------------ certificates


def _issue(
    where: Where, file_name: str, name: str, alternatives: list[Any], usages: tuple[str, ...]
) -> None:
    """Write a certificate for `name`, signed by the folder's authority, and its key."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    oids = {"serverAuth": ExtendedKeyUsageOID.SERVER_AUTH}
    oids["clientAuth"] = ExtendedKeyUsageOID.CLIENT_AUTH
    ca, ca_key = _read_authority(where.folder)
    key = _new_key()
    builder = (
        _builder(name, where.days, {"digital_signature": True})
        .public_key(key.public_key())
        .issuer_name(ca.subject)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.ExtendedKeyUsage([oids[usage] for usage in usages]), critical=True)
    )
    _write_pair(where, file_name, _sign(builder, key, ca_key), key)


def _builder(
    name: str, days: int, usage: dict[str, bool], is_ca: bool = False
) -> "x509.CertificateBuilder":
    from cryptography import x509

    if days < 1:
        raise UsageError(f"days must be at least 1, got {days}.")
    now = datetime.datetime.now(datetime.UTC)
    every = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment",
             "key_agreement", "key_cert_sign", "crl_sign", "encipher_only",
             "decipher_only")  # fmt: skip
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(is_ca, 0 if is_ca else None), critical=True)
        .add_extension(
            x509.KeyUsage(**{name: usage.get(name, False) for name in every}), critical=True
        )
    )


def _name(text: str) -> "x509.Name":
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _sign(
    builder: "x509.CertificateBuilder",
    key: "EllipticCurvePrivateKey",
    by: "EllipticCurvePrivateKey",
) -> "x509.Certificate":
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256

    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    signers = x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key())
    return (
        builder.add_extension(own, critical=False)
        .add_extension(signers, critical=False)
        .sign(by, SHA256())
    )


def _alternatives(names: tuple[str, ...]) -> list[Any]:
    """Host names and addresses in the form of a certificate's alternative names."""
    from cryptography import x509

    if not names:
        raise UsageError("Give the host names and addresses that it is called by, got none.")
    found: list[Any] = []
    for name in names:
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            if not re.fullmatch(r"[A-Za-z0-9*._-]+", name):
                raise UsageError(f"A host name or an address has no port, got {name!r}.") from None
            found.append(x509.DNSName(name))
    return found


def _new_key() -> "EllipticCurvePrivateKey":
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _read_authority(folder: Path) -> tuple[Any, Any]:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        ca = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        return ca, load_pem_private_key((folder / "ca.key").read_bytes(), None)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"There must be an authority in {folder}, got {error}; make one with "
            f"`python -m torchbeast.keys authority --folder {folder}`."
        ) from error


def _require_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "torchbeast.keys needs the package cryptography; install it with "
            "`pip install cryptography`."
        ) from error


# ------------------------------------------------------------------------------------------- files


def _write_pair(
    where: Where, name: str, certificate: "x509.Certificate", key: "EllipticCurvePrivateKey"
) -> None:
    """Write <name>.pem and <name>.key; between the two writes, a reader finds that they differ."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    pem, key_path = _vacant(where, f"{name}.pem"), _vacant(where, f"{name}.key")
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_private(key_path, secret)
    _write(pem, certificate.public_bytes(Encoding.PEM), 0o644)
    print(f"Wrote {pem} and {key_path}, valid until {certificate.not_valid_after_utc:%Y-%m-%d}.")


def _vacant(where: Where, name: str) -> Path:
    path = where.folder / name
    if path.exists() and not where.replace:
        raise UsageError(f"{path} is there already; give --replace to take its place.")
    return path


def _write(path: Path, data: bytes, mode: int) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
    beside.rename(path)


def _flags(where: Where, name: str) -> str:
    base = where.folder / name
    return f"--tls_cert {base}.pem --tls_key {base}.key"


if __name__ == "__main__":
    sys.exit(main())
