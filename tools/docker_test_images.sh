#!/usr/bin/env bash
# Makes the Docker tests runnable on a Debian machine whose engine reaches no image registry: the Compose v2 and buildx plugins, a base
# image (debian:bookworm-slim) and a busybox image (harbor-trl-busybox:latest), all from the machine's own apt sources.
# Does only what is missing. Where it cannot (no engine, no root) it says why in one line and succeeds: the Docker tests then
# skip with a reason of their own.
set -euo pipefail

BASE=debian:bookworm-slim
BUSYBOX=harbor-trl-busybox:latest

skip() {
    echo "skipped: $*"
    exit 0
}

say() { echo "docker_test_images: $*"; }

engine_answers() { timeout 20 docker version --format '{{.Server.Version}}' >/dev/null 2>&1; }

command -v docker >/dev/null || skip "no docker command on this machine"
if ! engine_answers; then
    command -v dockerd >/dev/null || skip "the Docker engine does not answer, and no dockerd is installed to start"
    [ "$(id -u)" = 0 ] || skip "the Docker engine is not running, and only root may start it"
    log=${TMPDIR:-/tmp}/harbor-trl-dockerd.log
    setsid dockerd >"$log" 2>&1 </dev/null &
    engine=$!
    for _ in $(seq 60); do
        sleep 1
        if engine_answers || ! kill -0 "$engine" 2>/dev/null; then break; fi
    done
    engine_answers || skip "dockerd does not start: $(tail -n 1 "$log")"
    say "started dockerd (log: $log)"
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The first URI in apt's sources that serves Debian's main archive (not security, not a third party's).
debian_uri() {
    command -v apt-get >/dev/null || return 0
    # ${...} would be the shell's: these are apt's own fields.
    # shellcheck disable=SC2016
    apt-get indextargets --format '$(ORIGIN) $(LABEL) $(COMPONENT) $(REPO_URI)' 'Created-By: Packages' 2>/dev/null |
        awk '$1 == "Debian" && $2 == "Debian" && $3 == "main" { print $4; exit }'
    # Before the first `apt-get update`, apt knows no origin.
}

uri=
need_debian() {
    [ -z "$uri" ] || return 0
    uri=$(debian_uri)
    if [ -z "$uri" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq >/dev/null 2>&1 || true
        uri=$(debian_uri)
    fi
    [ -n "$uri" ] || skip "$1 is missing, and apt's sources name no Debian archive to make it from"
}

# fetch SUITE PACKAGE: leaves the unpacked package in $work/PACKAGE, whatever the machine's own release is.
fetch() {
    local suite=$1 package=$2 state=$work/apt-$1
    mkdir -p "$state/lists/partial" "$state/archives/partial" "$work/$package"
    local keyring=/usr/share/keyrings/debian-archive-keyring.gpg signed=
    [ ! -f "$keyring" ] || signed="[signed-by=$keyring] "
    echo "deb $signed$uri $suite main" >"$state/sources.list"
    local options=(-qq -o "Dir::Etc::sourcelist=$state/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$state/lists"
        -o "Dir::Cache=$state" -o "Dir::Cache::archives=$state/archives" -o APT::Sandbox::User= -o Acquire::Retries=3)
    apt-get "${options[@]}" update >&2
    (cd "$state" && apt-get "${options[@]}" download "$package" >&2 && dpkg -x ./"$package"_*.deb "$work/$package")
}

# Debian carries both plugins from trixie on; each is one static binary that runs on older releases too. Compose is needed to
# run tasks, buildx only by the tests that hold copy plans against real builds.
plugins=${DOCKER_CONFIG:-$HOME/.docker}/cli-plugins
for plugin in compose buildx; do
    ! docker "$plugin" version >/dev/null 2>&1 || continue
    need_debian "the docker-$plugin plugin"
    fetch trixie "docker-$plugin"
    mkdir -p "$plugins"
    install -m 755 "$work/docker-$plugin/usr/libexec/docker/cli-plugins/docker-$plugin" "$plugins/.docker-$plugin.$$"
    mv "$plugins/.docker-$plugin.$$" "$plugins/docker-$plugin"
    docker "$plugin" version >/dev/null || { echo "docker-$plugin was installed into $plugins but does not run" >&2; exit 1; }
    say "installed $(docker "$plugin" version | head -n 1) into $plugins"
done

has_image() { docker image inspect "$1" >/dev/null 2>&1; }

if ! has_image "$BASE"; then
    need_debian "the image $BASE"
    [ "$(id -u)" = 0 ] || skip "the image $BASE is missing, and only root can make it (or run: docker pull $BASE)"
    command -v debootstrap >/dev/null || apt-get install -y -qq debootstrap >/dev/null 2>&1 ||
        skip "the image $BASE is missing, and debootstrap could not be installed"
    debootstrap --variant=minbase --include=python3-minimal,ca-certificates,procps,sudo bookworm "$work/base" "$uri" >"$work/debootstrap.log" ||
        { tail -n 5 "$work/debootstrap.log" >&2; exit 1; }
    rm -rf "$work"/base/var/cache/apt/archives/*.deb "$work"/base/var/lib/apt/lists/*
    # An import has no CMD of its own; the published image has this one.
    tar -C "$work/base" -c . | docker import --change 'CMD ["bash"]' - "$BASE" >/dev/null
    say "made $BASE"
fi
docker run --rm --network none "$BASE" bash -c 'true' || { echo "the image $BASE does not run" >&2; exit 1; }
docker run --rm --network none "$BASE" python3 -c 'pass' >/dev/null 2>&1 ||
    say "note: $BASE here has no python3 (pulled from a registry?): the Docker tests with Python verifiers will fail"

if ! has_image "$BUSYBOX"; then
    need_debian "the image $BUSYBOX"
    fetch bookworm busybox-static
    root=$work/busybox
    mkdir -p "$root/bin" "$root/etc" "$root/root"
    mkdir -m 1777 "$root/tmp"
    cp "$work/busybox-static/bin/busybox" "$root/bin/busybox"
    for applet in $("$root/bin/busybox" --list); do
        [ "$applet" = busybox ] || ln -s busybox "$root/bin/$applet"
    done
    echo 'root:x:0:0:root:/root:/bin/sh' >"$root/etc/passwd"
    echo 'root:x:0:' >"$root/etc/group"
    tar -C "$root" --owner=0 --group=0 -c . | docker import --change 'CMD ["sh"]' --change 'ENV PATH=/bin' - "$BUSYBOX" >/dev/null
    say "made $BUSYBOX"
fi
docker run --rm --network none "$BUSYBOX" sh -c 'true' || { echo "the image $BUSYBOX does not run" >&2; exit 1; }

say "ready: $(docker compose version --short 2>/dev/null || echo '?') (Compose), $BASE, $BUSYBOX"
