#!/bin/sh
# Keys of the tenants and certificates of the nodes of a pool, by openssl:
#
#   sh certificates.sh DIR a=10.77.0.11 b=10.77.0.12
#
# makes DIR/ca.pem (who signs nodes), and for each node DIR/NAME/{node,node.pem,node.key}. `node` is the id that belongs
# into the node's data directory before its first start: the certificate says that id. Keep DIR/ca.key away from nodes.
set -eu
umask 077
directory=$1
shift
mkdir -p "$directory"
cd "$directory"
[ -e ca.pem ] || openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 \
    -subj "/CN=kvstore pool" -keyout ca.key -out ca.pem 2>/dev/null
for one in "$@"; do
    name=${one%%=*}
    address=${one#*=}
    [ -e "$name/node.pem" ] && continue
    mkdir -p "$name"
    node=$(openssl rand -hex 16)
    printf '{"version": 1, "node": "%s"}\n' "$node" >"$name/node"
    printf 'subjectAltName=URI:kvstore:node:%s,DNS:%s.node.kvstore,IP:%s\n' "$node" "$node" "$address" >"$name/names"
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=$name" \
        -keyout "$name/node.key" -out "$name/request" 2>/dev/null
    openssl x509 -req -CA ca.pem -CAkey ca.key -CAcreateserial -days 365 -in "$name/request" \
        -extfile "$name/names" -out "$name/node.pem" 2>/dev/null
    rm "$name/request" "$name/names"
done
