// Continuous batching with libllama, as in its own server: each step decodes one token of each
// running request and fills the rest of the batch with chunks of prompts. The loop is in C++,
// because a loop in Python would slow down the engine that it measures.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "llama.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Request {
    const int32_t* prompt;
    int32_t num_prompt;
    int32_t num_output;
    double arrival_seconds;
    int32_t* tokens;
    double* seconds;
    int32_t num_computed = 0;
    int32_t num_generated = 0;
    int32_t row = -1;  // row of this step's logits, or -1 for none
};

struct Engine {
    llama_model* model;
    llama_context* context;
    int32_t vocab_size;
    int32_t batch_tokens;
    int32_t max_requests;
    llama_batch batch;
};

void put(llama_batch& batch, int32_t token, int32_t position, int32_t sequence, bool wanted) {
    const int32_t at = batch.n_tokens++;
    batch.token[at] = token;
    batch.pos[at] = position;
    batch.n_seq_id[at] = 1;
    batch.seq_id[at][0] = sequence;
    batch.logits[at] = wanted;
}

int32_t best_token(const float* logits, int32_t vocab_size) {
    return static_cast<int32_t>(std::max_element(logits, logits + vocab_size) - logits);
}

// Adds the next tokens of a request to the batch, at most `room` of them.
void plan(llama_batch& batch, Request& request, int32_t sequence, int32_t room) {
    const int32_t known = request.num_prompt + request.num_generated;
    const int32_t count = std::min(room, known - request.num_computed);
    for (int32_t i = 0; i < count; ++i) {
        const int32_t at = request.num_computed + i;
        const bool in_prompt = at < request.num_prompt;
        const int32_t token =
            in_prompt ? request.prompt[at] : request.tokens[at - request.num_prompt];
        const bool last = at + 1 == known;
        if (last) request.row = batch.n_tokens;
        put(batch, token, at, sequence, last);
    }
    request.num_computed += count;
}

}  // namespace

extern "C" {

// Writes the logits after each token of a text, [num_tokens, vocabulary]. It must fit one batch.
// Returns 0, or libllama's error.
int32_t quire_llama_logits(void* handle, int32_t num_tokens, const int32_t* tokens, float* logits) {
    Engine& engine = *static_cast<Engine*>(handle);
    llama_memory_clear(llama_get_memory(engine.context), false);
    engine.batch.n_tokens = 0;
    for (int32_t i = 0; i < num_tokens; ++i) put(engine.batch, tokens[i], i, 0, true);
    const int32_t error = llama_decode(engine.context, engine.batch);
    if (error != 0) return error;
    for (int32_t i = 0; i < num_tokens; ++i)
        std::copy_n(llama_get_logits_ith(engine.context, i), engine.vocab_size,
                    logits + static_cast<size_t>(i) * engine.vocab_size);
    return 0;
}

int32_t quire_llama_vocab_size(void* handle) { return static_cast<Engine*>(handle)->vocab_size; }

// Writes a file with other weights, of the kind that llama.cpp numbers so. Returns 0 if it is done.
uint32_t quire_llama_quantize(const char* source, const char* output, int32_t kind,
                              int32_t num_threads) {
    llama_backend_init();
    llama_model_quantize_params params = llama_model_quantize_default_params();
    params.ftype = static_cast<llama_ftype>(kind);
    params.nthread = num_threads;
    return llama_model_quantize(source, output, &params);
}

void* quire_llama_load(const char* path, int32_t context_tokens, int32_t batch_tokens,
                       int32_t step_tokens, int32_t max_requests, int32_t num_threads,
                       bool half_cache, bool unified) {
    llama_backend_init();
    llama_model* model = llama_model_load_from_file(path, llama_model_default_params());
    if (model == nullptr) return nullptr;
    llama_context_params params = llama_context_default_params();
    params.n_ctx = context_tokens;
    params.n_batch = batch_tokens;
    params.n_ubatch = step_tokens;
    params.n_seq_max = max_requests;
    params.n_threads = num_threads;
    params.n_threads_batch = num_threads;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.type_k = half_cache ? GGML_TYPE_F16 : GGML_TYPE_F32;
    params.type_v = params.type_k;
    params.kv_unified = unified;
    llama_context* context = llama_init_from_model(model, params);
    if (context == nullptr) return nullptr;
    const int32_t vocab_size = llama_vocab_n_tokens(llama_model_get_vocab(model));
    return new Engine{model,        context,      vocab_size,
                      batch_tokens, max_requests, llama_batch_init(batch_tokens, 0, 1)};
}

// Runs all requests, which are ordered by arrival. Returns 0, or libllama's error. `tokens` and
// `seconds` have room for the outputs of all requests, one request after the other.
int32_t quire_llama_run(void* handle, int32_t num_requests, const int32_t* prompts,
                        const int32_t* num_prompt, const int32_t* num_output,
                        const double* arrival_seconds, int32_t* tokens, double* seconds) {
    Engine& engine = *static_cast<Engine*>(handle);
    std::vector<Request> requests;
    for (int32_t i = 0; i < num_requests; ++i) {
        requests.push_back(
            {prompts, num_prompt[i], num_output[i], arrival_seconds[i], tokens, seconds});
        prompts += num_prompt[i];
        tokens += num_output[i];
        seconds += num_output[i];
    }
    llama_memory_t memory = llama_get_memory(engine.context);
    llama_memory_clear(memory, false);
    std::vector<Request*> running(engine.max_requests, nullptr);
    size_t next = 0;
    size_t num_running = 0;
    const auto started = Clock::now();
    const auto elapsed = [&] {
        return std::chrono::duration<double>(Clock::now() - started).count();
    };
    while (next < requests.size() || num_running > 0) {
        for (auto& slot : running) {
            if (slot == nullptr && next < requests.size() &&
                requests[next].arrival_seconds <= elapsed()) {
                slot = &requests[next++];
                ++num_running;
            }
        }
        if (num_running == 0) {
            const double wait = requests[next].arrival_seconds - elapsed();
            if (wait > 0) std::this_thread::sleep_for(std::chrono::duration<double>(wait));
            continue;
        }
        engine.batch.n_tokens = 0;
        for (const bool decodes : {true, false}) {
            for (size_t sequence = 0; sequence < running.size(); ++sequence) {
                Request* request = running[sequence];
                if (request == nullptr || (request->num_generated > 0) != decodes) continue;
                request->row = -1;
                const int32_t room = engine.batch_tokens - engine.batch.n_tokens;
                plan(engine.batch, *request, static_cast<int32_t>(sequence), room);
            }
        }
        const int32_t error = llama_decode(engine.context, engine.batch);
        if (error != 0) return error;
        for (size_t sequence = 0; sequence < running.size(); ++sequence) {
            Request* request = running[sequence];
            if (request == nullptr || request->row < 0) continue;
            const float* logits = llama_get_logits_ith(engine.context, request->row);
            request->tokens[request->num_generated] = best_token(logits, engine.vocab_size);
            request->seconds[request->num_generated++] = elapsed();
            request->row = -1;
            if (request->num_generated == request->num_output) {
                llama_memory_seq_rm(memory, static_cast<int32_t>(sequence), -1, -1);
                running[sequence] = nullptr;
                --num_running;
            }
        }
    }
    return 0;
}
}
