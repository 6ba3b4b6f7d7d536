#!/bin/sh
# The sidecar's image, of Debian's packages and Python's wheels alone: no registry of images is asked. From a checkout, or from
# the source distribution:
#
#   sh deploy/container/build.sh [IMAGE]
#
# EXTRAS=server,tls,adaptive   which extras are in it (server,tls); demo for `kvstore demo`, which brings torch
# BUILDER=docker               what builds it: the first that runs of podman, buildah and docker
# PYTHON=python3.12            one with pip, which makes the wheel and downloads those of other projects
set -eu
cd "$(dirname "$0")/../.."

suite=bookworm python=3.11 # what Debian has there
image=${1:-kvstore:$(sed -n 's/^__version__ = "\(.*\)"/\1/p' kvstore/__init__.py)}
extras=${EXTRAS:-server,tls}
pip="${PYTHON:-python3} -P -m pip --disable-pip-version-check"

found=
for builder in ${BUILDER:-podman buildah docker}; do
    "$builder" info >/dev/null 2>&1 && found=$builder && break
done
if [ -z "$found" ]; then
    echo "error: no image is built here: none of ${BUILDER:-podman buildah docker} runs (NAME info fails); install one, or start its daemon" >&2
    exit 1
fi
if ! command -v mmdebstrap >/dev/null; then
    echo 'error: no image is built here: mmdebstrap is not installed, which makes the root of it; apt-get install mmdebstrap' >&2
    exit 1
fi

demo=
echo "building $image with $found"
context=build/image
rm -rf $context build/lib && mkdir -p $context/wheels
cp deploy/container/Containerfile $context
unneeded='doc man info locale'
[ -s build/$suite.tar ] || mmdebstrap --quiet --variant=essential --include=python3,python3-venv,libstdc++6 \
    $(for one in $unneeded; do echo "--dpkgopt=path-exclude=/usr/share/$one/*"; done) $suite build/$suite.tar
cp build/$suite.tar $context/debian.tar

case ,$extras, in *,demo,*) [ ! -d demo-model ] || demo=./demo-model ;; esac
$pip wheel --quiet --no-deps --wheel-dir $context/wheels . $demo
platforms=$(for minor in $(seq 5 36); do echo "--platform=manylinux_2_${minor}_$(uname -m)"; done)
$pip download --quiet --only-binary=:all: --python-version $python $platforms --find-links $context/wheels \
    --dest $context/wheels --constraint constraints.txt "$(echo $context/wheels/prefix_kvstore-[0-9]*.whl)[$extras]"

format=--format=docker # keeps HEALTHCHECK
[ "$found" != docker ] || format=
exec "$found" build $format --build-arg EXTRAS="$extras" -t "$image" $context
