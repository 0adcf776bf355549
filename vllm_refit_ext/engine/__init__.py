"""Inside vLLM's worker, engine process and front end: the only room that names vLLM's private parts."""
