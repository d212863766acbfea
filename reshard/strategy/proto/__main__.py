"""Compile the `.proto` files of this folder into `descriptors.binpb`; needs grpcio-tools."""

import sys

from grpc_tools import protoc  # type: ignore[import-not-found, import-untyped, unused-ignore]

from reshard.strategy.proto import DESCRIPTORS, HERE

if __name__ == "__main__":
    sources = sorted(str(path) for path in HERE.glob("*.proto"))
    sys.exit(protoc.main(["protoc", f"-I{HERE}", f"--descriptor_set_out={DESCRIPTORS}", *sources]))
