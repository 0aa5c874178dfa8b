"""The compiled form of the fast path: C++ sources, built once on the machine that runs them.

    vector.h       sixteen lanes, the two element types
    tiles.h        some rows times some strips, in registers
    matrix_unit.h  the same by AMX
    multiply.h     rows times packed columns, the one product everything is made of
    plan.h         the attention of a step cut into units of work
    cache.h        where keys and values lie in a block
    strip_pointers.h  and in which order they are read
    attention.h    paged attention from that product
    adapters.h     what low-rank adapters add to a product
    layers.h       norms, rotation, gated activation
    team.h         the threads of one step
    workspace.h    the memory of one step
    decoder.h      what crosses the border to Python
    decoder.cpp    one step over all layers, in one parallel region

`build` compiles and caches, `library` loads and mirrors the structs. Neither the sources nor the
library depend on torch: pointers go in, numbers come out.
"""
