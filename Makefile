# npu-dra: every target sets up what it needs, or says exactly what is missing and how to get it.

CARGO ?= cargo
RELEASE_BINARIES = --package npu-dra --package npuctl --package testkit --package fake-dcmi

.PHONY: help ready release demo sandbox test cluster-test package-test lint bench packages release-check

help:
	@echo 'make demo     build, run the main job on a simulated node, end with "demo: ok"'
	@echo 'make test     every tier that needs neither root nor Go'
	@echo 'make cluster-test  the driver on real Kubernetes releases: needs root and Go;'
	@echo '              VERSION=1.36.3 for one of them, KEEP=1 leaves the last node up'
	@echo 'make lint     rustfmt and clippy, warnings are errors'
	@echo 'make bench    measure the budgets of tests/bench/budgets.toml'
	@echo 'make packages  DEBs and RPMs in dist/, for this machine or ARCH=x86_64|aarch64'
	@echo 'make package-test  installs, upgrades and removes the packages of dist/ under a real systemd: needs root;'
	@echo '              SET=trixie, CASE=upgrade for some of it, KEEP=1 leaves the machines up'
	@echo 'make release-check  both architectures, same bytes from a second, offline build, the demo for aarch64'
	@echo 'make sandbox  a simulated node that stays up, with lines to try'

ready:
	@sh tests/ready.sh

release: ready
	$(CARGO) build --release --locked $(RELEASE_BINARIES)

demo: release
	target/release/testkit demo

sandbox: release
	target/release/testkit sandbox

test: release
	$(CARGO) test --workspace --locked
	NPU_DRA_CRASH_DAEMON=$(CURDIR)/target/release/npu-dra $(CARGO) test --locked --package npu-dra --test crash -- --nocapture
	@echo
	@echo 'tiers run:     unit, property, backend suite, integration, crash'
	@echo 'tiers not run: cluster  (make cluster-test: real Kubernetes; needs root and Go)'
	@echo '               packages (make packages package-test: real systemd, DEB, RPM; needs root)'

cluster-test:
	@sh tests/cluster/ready.sh
	$(MAKE) release
	$(CARGO) build --workspace --locked --bin cluster-test
	target/debug/cluster-test

package-test:
	@sh tests/packages/ready.sh
	$(MAKE) release
	$(CARGO) build --workspace --locked --bin package-test
	target/debug/package-test

lint: ready
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings

bench: release
	$(CARGO) bench --locked --package npu-dra --bench budgets

# Packed from one release build, linked for glibc 2.28; the tools it needs are installed, or named.
ARCH ?= $(shell uname -m)

packages: ready
	packaging/check.sh units
	packaging/build.sh $(ARCH)
	packaging/pack.sh $(ARCH) dist
	packaging/check.sh packages dist/*

# An hour on two cores, as root: not part of continuous integration.
release-check: ready
	packaging/release-check.sh
