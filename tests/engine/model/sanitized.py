"""A pytest plugin: the kernels of one variant, compiled with sanitizers.

Their runtimes have to be loaded first, so this is no option of a plain run: see `check_native`,
which names the sanitizers and the variant in the environment.
"""

import os
from pathlib import Path

from engine.model.kernels import build

SANITIZER = os.environ["QUIRE_TEST_SANITIZER"]
#: The sanitizer of threads cannot follow those of OpenMP's own library: see the file.
OPENMP = (str(Path(__file__).with_name("openmp.cpp")), "-Wl,-Bsymbolic")

#: Little optimisation, so that what is reported is what was written; the first report ends the run.
build._FLAGS = (
    *build._FLAGS,
    f"-fsanitize={SANITIZER}",
    *("-fno-sanitize-recover=all", "-g", "-O1"),
    *(OPENMP if SANITIZER == "thread" else ()),
)
# So it is the best one, and the only one of the tests that try each.
build.VARIANTS = tuple(
    variant for variant in build.VARIANTS if variant.name == os.environ["QUIRE_TEST_VARIANT"]
)
