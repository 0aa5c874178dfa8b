"""The kernels on a CPU: C++ sources, compiled once on the machine that runs them.

They are the fast path, and the recurrences of models on the wide path.

    vector.h          vectors of sixteen lanes, the two element types
    rounded_rows.h    activation rows rounded to the type in which they are multiplied
    deferred_work.h   vector work that runs while AMX multiplies
    tiles.h           the micro-kernels: register tiles of rows times strips, with vectors
    matrix_unit.h     the micro-kernels with AMX
    team.h            the thread team of one step: barriers and work stealing
    multiply.h        one thread's rows times packed strips: the loop around the micro-kernels
    product.h         how the team shares out one matrix product
    plan.h            the attention of a step, cut into units of work
    cache.h           the layout of keys and values in a KV block
    strip_pointers.h  pointers to keys and values in the order in which they are read
    softmax.h         softmax weights, and merging of partial results
    attention.h       paged attention, built from the same micro-kernels
    adapters.h        low-rank adapters (LoRA)
    layers.h          norms, rotary embedding, gated activation, output writers
    argmax.h          greedy tokens without writing the logits
    workspace.h       the scratch buffers of one step
    convolution.h     causal convolutions of single channels
    short_convolution.h  those of a step, with gates
    decoder.h         the C interface of the decoder, for Python
    decoder.cpp       one step over all layers, in one parallel region
    activated_convolution.h  those of a step, with an activation
    recurrent_mixer.h  the mixers of a step that have such a recurrence
    recurrence.h      recurrences whose state is a matrix for each head
    recurrent.h       the C interface of these two, for Python
    recurrent.cpp     one recurrence of a layer, divided among threads

`build` compiles and caches, `library` loads the library and mirrors the structs. Neither the
sources nor the library depend on torch: their arguments are pointers and numbers.
"""
