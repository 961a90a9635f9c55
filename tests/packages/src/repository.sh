# Makes /packages a repository, with a stub that provides what the base of a distribution with RPMs has. The rpm database
# of this machine is empty; all else that the packages ask for, the solver must find.
mkdir -p /packages/stub
cat >/packages/stub.spec <<'SPEC'
Name: stub-base
Version: 1
Release: 1
Summary: What the base of a distribution provides
License: Apache-2.0
BuildArch: noarch
Provides: systemd = 249
Provides: /bin/sh
Provides: /usr/bin/getent
Provides: /usr/sbin/groupadd
%description
Nothing.
%prep
%build
%install
%files
SPEC
# glibc's own provides are many and versioned: those up to the floor, and no later one.
arch='()(64bit)'
libraries='libc.so.6 libm.so.6 libdl.so.2 libpthread.so.0 librt.so.1 libutil.so.1 ld-linux-x86-64.so.2 ld-linux-aarch64.so.1'
for library in $libraries; do
    echo "Provides: $library$arch"
    for version in 2.2.5 2.3 2.3.2 2.3.3 2.3.4 2.4 2.5 2.6 2.7 2.8 2.9 2.10 2.11 2.12 2.13 2.14 2.15 2.16 2.17 2.18 2.22 \
        2.23 2.24 2.25 2.26 2.27 2.28; do
        echo "Provides: $library(GLIBC_$version)(64bit)"
    done
done >/packages/provides
echo 'Provides: rtld(GNU_HASH)' >>/packages/provides
sed -i '/^BuildArch/r /packages/provides' /packages/stub.spec
rpmbuild -bb --define '_topdir /packages/build' --define '_rpmdir /packages/stub' /packages/stub.spec >/packages/stub.log 2>&1
createrepo_c -q /packages
mkdir -p /etc/yum.repos.d
cat >/etc/yum.repos.d/packages.repo <<'REPO'
[packages]
name=packages
baseurl=file:///packages
enabled=1
gpgcheck=0
REPO
dnf -y install stub-base
