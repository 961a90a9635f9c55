//! Who may ask for what, decided from the credentials of the peer and not from the file mode alone.

use tokio::net::unix::UCred;

/// The peer of a connection, as the kernel saw it when it connected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// User.
    pub uid: u32,
    /// Primary group.
    pub gid: u32,
    /// Supplementary groups, as far as they are known.
    pub groups: Vec<u32>,
}

/// What a call wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// To look.
    Read,
    /// To change something.
    Change,
}

/// The group whose members may look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Readers {
    /// Its name, for messages.
    pub name: String,
    /// Its number.
    pub gid: u32,
}

/// Who may do what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Permissions {
    /// The user that the daemon runs as: whoever is that user could do it all without asking.
    pub owner: u32,
    /// The group whose members may look; `None` if the node has no such group.
    pub readers: Option<Readers>,
}

/// Why a call is not permitted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// The kernel told nothing of the peer.
    #[error("the caller's credentials are not known")]
    Stranger,
    /// Not root, and no member of the group.
    #[error("user {uid} is neither root nor a member of group {group}")]
    NotReader {
        /// The user.
        uid: u32,
        /// The group.
        group: String,
    },
    /// Not root, and there is no group.
    #[error("user {uid} is not root, and this node has no group whose members may look")]
    NoReaders {
        /// The user.
        uid: u32,
    },
    /// Only root changes anything.
    #[error("user {uid} is not root, and only root may change anything")]
    NotRoot {
        /// The user.
        uid: u32,
    },
}

impl Permissions {
    /// Decides one call.
    pub fn decide(&self, caller: Option<&Caller>, access: Access) -> Result<(), Denied> {
        let caller = caller.ok_or(Denied::Stranger)?;
        let uid = caller.uid;
        if self.is_master(uid) {
            return Ok(());
        }
        match (access, &self.readers) {
            (Access::Change, _) => Err(Denied::NotRoot { uid }),
            (Access::Read, None) => Err(Denied::NoReaders { uid }),
            (Access::Read, Some(readers)) if caller.gid == readers.gid || caller.groups.contains(&readers.gid) => {
                Ok(())
            }
            (Access::Read, Some(readers)) => Err(Denied::NotReader { uid, group: readers.name.clone() }),
        }
    }

    /// The caller behind a connection. Supplementary groups are looked up only where they could matter.
    pub(super) fn caller(&self, peer: Option<UCred>) -> Option<Caller> {
        let peer = peer?;
        let (uid, gid) = (peer.uid(), peer.gid());
        let matter = !self.is_master(uid) && self.readers.as_ref().is_some_and(|readers| readers.gid != gid);
        let groups = match peer.pid() {
            // procfs answers from memory, so this does not block in any way that counts.
            Some(pid) if matter && pid > 0 => std::fs::read_to_string(format!("/proc/{pid}/status"))
                .map(|status| groups_of(&status, uid))
                .unwrap_or_default(),
            _ => Vec::new(),
        };
        Some(Caller { uid, gid, groups })
    }

    fn is_master(&self, uid: u32) -> bool {
        uid == 0 || uid == self.owner
    }
}

/// Supplementary groups in the text of `/proc/<pid>/status`; none if the process is not `uid`'s (any more), since its
/// number may have gone to another one.
fn groups_of(status: &str, uid: u32) -> Vec<u32> {
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::split_whitespace);
    let is_same = field("Uid:").is_some_and(|mut ids| ids.nth(1).and_then(|id| id.parse().ok()) == Some(uid));
    if !is_same {
        return Vec::new();
    }
    field("Groups:").map(|groups| groups.filter_map(|group| group.parse().ok()).collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn permissions() -> Permissions {
        Permissions { owner: 0, readers: Some(Readers { name: "npu-dra".to_owned(), gid: 990 }) }
    }

    fn caller(uid: u32, gid: u32, groups: &[u32]) -> Caller {
        Caller { uid, gid, groups: groups.to_vec() }
    }

    #[test]
    fn root_may_do_everything() {
        for access in [Access::Read, Access::Change] {
            assert_eq!(permissions().decide(Some(&caller(0, 0, &[])), access), Ok(()));
            let nobody = Permissions { owner: 0, readers: None };
            assert_eq!(nobody.decide(Some(&caller(0, 5, &[])), access), Ok(()));
        }
    }

    #[test]
    fn members_of_the_group_may_look_and_change_nothing() {
        for member in [caller(1000, 990, &[]), caller(1000, 1000, &[4, 990])] {
            assert_eq!(permissions().decide(Some(&member), Access::Read), Ok(()));
            assert_eq!(permissions().decide(Some(&member), Access::Change), Err(Denied::NotRoot { uid: 1000 }));
        }
    }

    #[test]
    fn somebody_who_connects_and_is_no_member_is_denied() {
        let stranger = caller(1000, 1000, &[4, 27]);
        let denied = permissions().decide(Some(&stranger), Access::Read).unwrap_err();
        assert_eq!(denied.to_string(), "user 1000 is neither root nor a member of group npu-dra");
        assert!(permissions().decide(Some(&stranger), Access::Change).is_err());
        // Group root is not user root.
        assert!(permissions().decide(Some(&caller(1000, 0, &[0])), Access::Read).is_err());
    }

    #[test]
    fn without_a_group_only_root_may_look() {
        let permissions = Permissions { owner: 0, readers: None };
        let denied = permissions.decide(Some(&caller(1000, 990, &[990])), Access::Read);
        assert_eq!(denied, Err(Denied::NoReaders { uid: 1000 }));
    }

    #[test]
    fn a_peer_without_credentials_is_denied() {
        assert_eq!(permissions().decide(None, Access::Read), Err(Denied::Stranger));
    }

    #[test]
    fn the_user_that_runs_the_daemon_is_its_master() {
        let own = Permissions { owner: 1000, readers: None };
        assert_eq!(own.decide(Some(&caller(1000, 1000, &[])), Access::Change), Ok(()));
        assert!(own.decide(Some(&caller(1001, 1000, &[])), Access::Read).is_err());
    }

    #[test]
    fn groups_are_taken_only_from_a_process_of_the_same_user() {
        let status = "Name:\tnpuctl\nUid:\t1000\t1000\t1000\t1000\nGid:\t100\t100\t100\t100\nGroups:\t4 27 990 \n";
        assert_eq!(groups_of(status, 1000), [4, 27, 990]);
        assert_eq!(groups_of(status, 1001), [0u32; 0]);
        assert_eq!(groups_of("", 0), [0u32; 0]);
        assert_eq!(groups_of("Uid:\t7\t7\nGroups:\t\n", 7), [0u32; 0]);
    }
}
