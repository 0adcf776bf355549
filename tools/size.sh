#!/bin/sh
# Lines of Python of the two packages, by room: a folder, or the files beside it.
set -eu
cd "$(dirname "$0")/.."
find vllm_refit_ext megatron_sender -name '*.py' -exec wc -l {} + | awk '
    $2 == "total" { next }
    {
        n = split($2, part, "/")
        room = n > 2 ? part[1] "/" part[2] : part[1]
        lines[room] += $1; files[room]++; all += $1; count++
        if ($1 > 400) long[$2] = $1
    }
    END {
        for (room in lines) printf "%6d  %3d files  %s\n", lines[room], files[room], room | "sort -k4"
        close("sort -k4")
        printf "%6d  %3d files  both packages\n", all, count
        for (file in long) printf "over 400 lines: %s (%d)\n", file, long[file]
    }'
