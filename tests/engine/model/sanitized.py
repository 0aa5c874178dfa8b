"""A pytest plugin: the kernels, compiled with the address and undefined behaviour sanitizers.

Their runtimes have to be loaded first, so this is no option of a plain run: see `check_native`.
"""

from engine.model.kernels import build

#: Little optimisation, so that what is reported is what was written; the first report ends the run.
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1")

build._FLAGS = (*build._FLAGS, *SANITIZERS)
