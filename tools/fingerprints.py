"""Print the digests of the functions that the compiled pipeline replaces.

python -m tools.fingerprints

They are of the installed FastStream and FastDepends: of each function, and of each group, as
`KNOWN` of faststream_sqlbroker/subscriber/pipeline/fingerprints.py has it. What is printed for two
versions differs where their functions do. The digest of a group belongs into `KNOWN` once these
were read, and do what the compiled pipeline does in their place.
"""

from faststream_sqlbroker.subscriber.pipeline.fingerprints import combine_digests, iter_digests
from faststream_sqlbroker.subscriber.pipeline.replaced import REPLACED


def main() -> None:
    """Print them."""
    for group in REPLACED:
        found = list(iter_digests(group))
        print(f"{combine_digests(found)} {group}")
        for name, digest in found:
            print(f"    {digest} {name}")


if __name__ == "__main__":
    main()
