"""Imported first by the process that engines are forked from (`processes`): vLLM, once for all."""

from examples.support.launch import import_engine

import_engine()
