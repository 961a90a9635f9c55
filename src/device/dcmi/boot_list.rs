//! The vendor's list of vNPUs that its boot script makes again, `/etc/vnpu.cfg`. It is read here and never written.

use std::{
    fs::{self, File},
    io::{self, Read as _},
    path::Path,
};

use super::ffi;

/// Largest file that the vendor's software takes, in bytes.
const MAX_SIZE: u64 = 4 << 20;

/// What the file says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct BootList {
    /// Whether the vNPUs are made again; `None` if it does not say.
    pub(super) replay: Option<bool>,
    /// Their ids, sorted.
    pub(super) ids: Vec<u32>,
}

impl BootList {
    /// Reads the file; one that does not exist lists nothing.
    pub(super) fn read(path: &Path) -> io::Result<Self> {
        match fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            // Opening a pipe would wait for its writer.
            Ok(metadata) if !metadata.is_file() => return Err(io::Error::other("it is not a regular file")),
            Err(error) => return Err(error),
            Ok(_) => {}
        }
        let mut bytes = Vec::new();
        File::open(path)?.take(MAX_SIZE + 1).read_to_end(&mut bytes)?;
        if u64::try_from(bytes.len()).is_ok_and(|size| size > MAX_SIZE) {
            return Err(io::Error::other(format!("it is larger than {MAX_SIZE} bytes")));
        }
        Ok(Self::parse(&String::from_utf8_lossy(&bytes)))
    }

    /// A line that makes no sense is left out: the vendor's script cannot make a vNPU of it either.
    fn parse(text: &str) -> Self {
        let lines = || text.lines().map(str::trim);
        let replay = lines().find_map(|line| match line.strip_prefix("vnpu_config_recover:")?.trim() {
            "enable" => Some(true),
            "disable" => Some(false),
            _ => None,
        });
        let block = lines()
            .skip_while(|line| *line != "[vnpu-config start]")
            .skip(1)
            .take_while(|line| *line != "[vnpu-config end]");
        // Physical id, vNPU id, command.
        let id = |line: &str| line.split(':').nth(1)?.trim().parse::<u32>().ok();
        let mut ids: Vec<u32> =
            block.filter_map(id).filter(|id| (ffi::FIRST_VDEV_ID..=ffi::LAST_ID).contains(id)).collect();
        ids.sort_unstable();
        ids.dedup();
        Self { replay, ids }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_read_as_the_vendor_writes_it() {
        let text = "vnpu_config_recover:enable\n[vnpu-config start]\n\
                    1:117:npu-smi set -t create-vnpu -i 1 -c 0 -f vir05_1c_8g -v 117\n\
                    0:100:npu-smi set -t create-vnpu -i 0 -c 0 -f vir01 -v 100 -g 0\n[vnpu-config end]\n";
        assert_eq!(BootList::parse(text), BootList { replay: Some(true), ids: vec![100, 117] });
        let off = text.replace("enable", "disable").replace('\n', "\r\n");
        assert_eq!(BootList::parse(&off), BootList { replay: Some(false), ids: vec![100, 117] });
    }

    #[test]
    fn lines_that_make_no_sense_are_left_out() {
        let text = "\u{feff}vnpu_config_recover:maybe\n1:150:outside\n[vnpu-config start]\n\n:\n1\n1:x:y\n1:-100:y\n\
                    1:65535:y\n1:99:y\n1:4294967296:y\n2 : 132 : y\n2:132:again\n3:148";
        assert_eq!(BootList::parse(text), BootList { replay: None, ids: vec![132, 148] });
        assert_eq!(BootList::parse(""), BootList::default());
        assert_eq!(BootList::parse("[vnpu-config end]\n[vnpu-config start]"), BootList::default());
    }

    #[test]
    fn a_file_that_is_not_there_lists_nothing_and_one_that_cannot_be_read_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vnpu.cfg");
        assert_eq!(BootList::read(&path).unwrap(), BootList::default());
        fs::write(&path, b"vnpu_config_recover:disable\n\xff\xfe[vnpu\n").unwrap();
        assert_eq!(BootList::read(&path).unwrap().replay, Some(false));
        assert!(BootList::read(dir.path()).is_err(), "a directory");
        let long = usize::try_from(MAX_SIZE).unwrap() + 1;
        fs::write(&path, vec![b'\n'; long]).unwrap();
        assert!(BootList::read(&path).unwrap_err().to_string().contains("larger"));
    }
}
