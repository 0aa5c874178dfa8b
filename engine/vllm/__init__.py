"""vLLM as an engine of a worker. Only this package imports vllm, and only some of its modules do.

vLLM plans, caches and computes logits; Quire chooses the tokens, ends the requests and writes their
text, with the code of the native engine. So both engines continue each other's requests.
"""
