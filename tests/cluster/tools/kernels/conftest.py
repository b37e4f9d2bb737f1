from tests.kvpaging.kernels.conftest import compiling

__all__ = ["compiling"]
