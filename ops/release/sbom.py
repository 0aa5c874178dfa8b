"""`make sbom`: writes a bill of materials and a table of licences for the worker's image.

They list all direct and indirect dependencies of the image's extras, and no other packages of the
environment. The bill is in CycloneDX's format. Fails if a licence is not in licences.toml. Needs
the extra `release` and the extras of the image.
"""

import json
import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ops.release.commands import Refused, run
from ops.release.licences import LicenceRules, licence_of

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "sbom"
#: The extras that the image installs (ops/Dockerfile).
IMAGE_EXTRAS = (
    *("worker", "gateway", "notifier", "console", "s3"),
    *("grammars", "gguf", "fp8", "pictures", "otel"),
)


def main() -> int:
    """Write both files; returns the exit code."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    try:
        names = closure(roots(project))
        FOLDER.mkdir(parents=True, exist_ok=True)
        write_bill(names, FOLDER / "worker.cdx.json")
        faults = write_licences(names, FOLDER / "licences.md")
    except Refused as refused:
        faults = [str(refused)]
    for fault in faults:
        sys.stderr.write(f"sbom: {fault}\n")
    if faults:
        return 1
    print(f"sbom: {len(names)} packages in {FOLDER.relative_to(ROOT)}, every licence is allowed")
    return 0


def roots(project: Mapping, *, extras: Iterable[str] = IMAGE_EXTRAS) -> list[Requirement]:
    """The direct requirements of an image with these extras, without the extras that these name."""
    texts = [text for name in extras for text in project["optional-dependencies"][name]]
    every = map(Requirement, (*project["dependencies"], *texts))
    return [each for each in every if each.name != project["name"]]


def closure(direct: Iterable[Requirement]) -> set[str]:
    """The names of all direct and indirect dependencies. `Refused` if one is not installed."""
    open_ones = [(each, extra) for each in direct for extra in ("", *each.extras)]
    seen: set[tuple[str, str]] = set()
    while open_ones:
        requirement, extra = open_ones.pop()
        name = canonicalize_name(requirement.name)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            needed = metadata.requires(name) or ()
        except metadata.PackageNotFoundError:
            raise Refused(f"{name} is not installed: run `make sbom`, which installs it") from None
        for text in needed:
            each = Requirement(text)
            if each.marker is None or each.marker.evaluate({"extra": extra}):
                open_ones += [(each, own) for own in ("", *each.extras)]
    return {name for name, _ in seen}


def write_bill(names: set[str], path: Path) -> None:
    """Write CycloneDX's bill of the named packages; raises `Refused` if one is missing."""
    program = [sys.executable, "-m", "cyclonedx_py", "environment", sys.executable]
    bill = json.loads(
        run([*program, "--pyproject", str(ROOT / "pyproject.toml"), "--output-reproducible"])
    )
    bill = only(bill, names)
    absent = names - {canonicalize_name(each["name"]) for each in bill["components"]}
    if absent:
        raise Refused(f"the bill of materials lacks {', '.join(sorted(absent))}")
    text = json.dumps(bill, indent=2)
    # Imported here, because only the extra `release` has it.
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    if fault := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise Refused(f"the bill of materials is not valid: {fault}")
    path.write_text(text + "\n", "utf-8")


def only(bill: Mapping, names: set[str]) -> dict:
    """A bill with only the named components, and the dependencies between them."""
    kept = [each for each in bill["components"] if canonicalize_name(each["name"]) in names]
    root = bill["metadata"]["component"]["bom-ref"]
    known = {root, *(each["bom-ref"] for each in kept)}
    links = [
        {**each, "dependsOn": [ref for ref in each.get("dependsOn", []) if ref in known]}
        for each in bill["dependencies"]
        if each["ref"] in known
    ]
    return {**bill, "components": kept, "dependencies": links}


def write_licences(names: set[str], path: Path) -> list[str]:
    """Write the table of licences; returns a message for each licence that is not allowed."""
    program = [sys.executable, "-m", "piplicenses", "--format=json", "--from=all"]
    rows = json.loads(run([*program, "--with-system", "--packages", *sorted(names)]))
    rules = LicenceRules.read()
    lines = ["| package | version | licence | why it is accepted |", "|---|---|---|---|"]
    faults = []
    for row in sorted(rows, key=lambda row: row["Name"].lower()):
        licence = rules.spelled(licence_of(row))
        reason = rules.reason(row["Name"], licence)
        if reason is None:
            faults.append(f"{row['Name']} has the licence {licence!r}, not in licences.toml")
        lines.append(f"| {row['Name']} | {row['Version']} | {licence} | {reason or 'refused'} |")
    path.write_text("\n".join(lines) + "\n", "utf-8")
    absent = names - {canonicalize_name(row["Name"]) for row in rows}
    return faults + [f"the table of licences lacks {name}" for name in sorted(absent)]


if __name__ == "__main__":
    sys.exit(main())
