"""The settings that gateway and batcher share: where files are, and how large they may be."""

from pathlib import Path

from quire.wire.arguments import MAX_SECONDS
from service.shared.batches.records import MAX_EXPIRY_SECONDS, MIN_EXPIRY_SECONDS
from service.shared.settings.fields import setting
from service.shared.settings.reading import CompanionSettings

#: The limits of OpenAI's batch API.
MAX_FILE_BYTES, MAX_LINES = 200_000_000, 50_000


class FileSettings(CompanionSettings):
    """Settings of the files API. The same values belong to all gateways and batchers of a queue."""

    models_file: Path | None = setting(
        "Queue",
        "TOML file of models and the queues that serve them; the same one for all gateways and "
        "batchers. Unset: every call goes to `queue`.",
        default=None,
    )
    files_folder: Path | None = setting(
        "Files and batches",
        "Folder of uploaded files and of the results of batches; the same one for all gateways and "
        "batchers, unless `files_url` names an object store. Unset: no files and no batches.",
        default=None,
    )
    files_url: str | None = setting(
        "Files and batches",
        "Object store for the contents of files, as `s3://bucket/prefix` (extra `s3`; its keys and "
        "its endpoint are the variables `AWS_*`). `files_folder` is then for temporary files.",
        default=None,
        pattern=r"^s3://[^/]+(/.*)?$",
    )
    max_file_bytes: int = setting(
        "Files and batches", "Largest file.", default=MAX_FILE_BYTES, ge=1, le=1 << 40
    )
    file_seconds: int = setting(
        "Files and batches",
        "How long files are kept, unless their `expires_after` is shorter, and records of batches "
        "after their end.",
        default=MAX_EXPIRY_SECONDS,
        ge=MIN_EXPIRY_SECONDS,
        le=MAX_SECONDS,
    )
