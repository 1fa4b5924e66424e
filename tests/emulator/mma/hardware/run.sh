#!/bin/sh
# Compiles a program of generate.py, $1, and runs it on this machine's sm_90a GPU; writes $2.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir -p "$(dirname "$2")"
nvcc -gencode arch=compute_90a,code=sm_90a -O1 -o "$folder/program" "$1"
"$folder/program" "$2"
