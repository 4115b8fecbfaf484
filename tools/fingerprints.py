"""Print the digests of the functions that the compiled pipeline replaces, as `KNOWN` has them.

python -m tools.fingerprints

They are of the installed FastStream and FastDepends. A digest belongs into `KNOWN` of
faststream_sqlbroker/subscriber/pipeline/fingerprints.py once its function was read, and does what
the compiled pipeline does in its place.
"""

from faststream_sqlbroker.subscriber.pipeline.fingerprints import digests
from faststream_sqlbroker.subscriber.pipeline.replaced import REPLACED


def main() -> None:
    """Print them."""
    for group in REPLACED:
        print(f'    "{group}": {{')
        for name, digest in digests(group):
            print(f'        "{name}": ("{digest}",),')
        print("    },")


if __name__ == "__main__":
    main()
