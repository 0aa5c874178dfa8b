"""Draws tokens from whole vocabularies on a device, reading each logit once.

In torch operations the noise alone is dozens of passes over the vocabulary, most of them in double
precision. Knows no row.
"""

import logging
import math

import torch

from engine.model.device.launcher import Launcher
from engine.model.kernels.build import KernelsUnavailable
from engine.model.sampling.noise import gumbel, noise_keys

#: Tokens of the vocabulary for each program.
TILE = 1024
#: Rows that are compared when a process starts, and their temperatures.
CHECKED_TEMPERATURES = (1.0, 0.3, 1.7, 1e-30)

logger = logging.getLogger(__name__)


class FusedDraw:
    """Temperature, noise and argmax as one Triton kernel.

    Raises:
        KernelsUnavailable: Triton is not installed. A call also raises it: Triton cannot compile
            its kernel here.
    """

    def __init__(self) -> None:
        try:
            from engine.model.sampling import noise_kernels
        except ImportError as error:
            raise KernelsUnavailable(f"Triton is not installed: {error}") from error
        self._launch = Launcher(noise_kernels)

    def __call__(
        self,
        logits: torch.Tensor,
        *,
        rows: torch.Tensor,
        best: torch.Tensor,
        temperatures: torch.Tensor,
        keys: torch.Tensor,
    ) -> torch.Tensor:
        """[drawn] tokens; of equal scores, the first wins.

        Args:
            logits: [rows, vocabulary] float32.
            rows: [drawn] int64, the rows to draw for.
            best: [rows, 1], the largest logit of each row.
            temperatures: [drawn, 1] float32.
            keys: [drawn, 2], from `noise_keys`.
        """
        vocabulary = logits.shape[1]
        tiles = -(-vocabulary // TILE)
        scores = logits.new_empty(len(rows), tiles, dtype=torch.float64)
        tokens = rows.new_empty(len(rows), tiles)
        assert logits.stride(1) == 1 and best.is_contiguous()
        self._launch(
            "draw_tiles",
            (len(rows), tiles),
            logits,
            rows,
            best,
            temperatures,
            keys,
            scores,
            tokens,
            logits.stride(0),
            VOCABULARY=vocabulary,
            TILE=TILE,
        )
        return tokens.gather(1, scores.argmax(dim=-1, keepdim=True))[:, 0]


@torch.inference_mode()
def fused_draw(device: torch.device, vocab_size: int) -> FusedDraw | None:
    """A `FusedDraw` that draws as torch operations do on this device; None if there is none."""
    if device.type != "cuda":
        return None
    try:
        draw = FusedDraw()
        check_draw(draw, device, vocab_size)
    except (KernelsUnavailable, ArithmeticError) as reason:
        logger.warning("tokens are drawn by torch operations: %s", reason)
        return None
    return draw


def check_draw(draw: FusedDraw, device: torch.device, vocab_size: int) -> None:
    """Draw some rows by torch operations also; some tokens are masked, and a row is not drawn.

    Raises:
        ArithmeticError: a token differs.
    """
    count = len(CHECKED_TEMPERATURES)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(count + 1, vocab_size, generator=generator).mul_(3.0).to(device)
    logits[:, ::7] = -math.inf
    best = logits.amax(dim=-1, keepdim=True)
    rows = torch.arange(count, 0, -1, device=device)
    temperatures = torch.tensor(CHECKED_TEMPERATURES, device=device)[:, None]
    keys = torch.from_numpy(noise_keys([(seed, 3) for seed in range(count)])).to(device)
    found = draw(logits, rows=rows, best=best, temperatures=temperatures, keys=keys)
    token_ids = torch.arange(vocab_size, dtype=torch.int32, device=device)
    scaled = (logits[rows] - best[rows]) / temperatures
    expected = (gumbel(token_ids, keys) + scaled).argmax(dim=-1)
    if not torch.equal(found, expected):
        raise ArithmeticError(f"a kernel draws {found.tolist()}, not {expected.tolist()}")
