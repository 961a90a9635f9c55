//! Reading, making and destroying vNPUs, and what the vendor's own software does with them.
//!
//! A call that fails says little about what has happened: it is the caller's to read the card before it decides.

use serde::de::DeserializeOwned;

use super::{
    BACKEND,
    boot_list::BootList,
    ffi,
    reading::failed,
    session::Session,
    wire::{Free, NODE, Outcome, Request, TemplateName, Trade, Trouble, Vnpu},
};
use crate::{
    device::{Fault, VendorMode},
    domain::{
        npu::MIB,
        vnpu::{self, CardReading, Resources, VnpuReading},
    },
};

/// How often a card is read anew because a vNPU was destroyed while it was read.
const READINGS: u32 = 3;

/// The fault of an answer, where none has a meaning of its own.
fn fault(request: Request, trouble: Trouble, cannot: &'static str) -> Fault {
    match trouble {
        Trouble::Missing | Trouble::Code(ffi::ERR_NOT_SUPPORT) => {
            Fault::Unsupported { backend: BACKEND, call: cannot, why: format!("{request} answered: {trouble}") }
        }
        Trouble::Code(ffi::ERR_NOT_SUPPORT_IN_CONTAINER) => {
            busy(request, trouble, "a process runs on the chip; end it, or wait")
        }
        Trouble::Code(ffi::ERR_RESOURCE_OCCUPIED) => {
            busy(request, trouble, "another process works on the vNPUs of this host, or a container holds the chip")
        }
        trouble => failed(request, trouble),
    }
}

fn busy(request: Request, trouble: Trouble, why: &str) -> Fault {
    Fault::Busy { backend: BACKEND, call: request.to_string(), why: format!("{trouble}: {why}") }
}

/// The fault of an answer whose code alone would not help anybody.
fn explained(request: Request, trouble: Trouble, why: &str) -> Fault {
    Fault::Failed { backend: BACKEND, call: request.to_string(), why: format!("{trouble}: {why}") }
}

impl Session {
    /// Fails where the library lacks calls. Nothing is made that could not be read back and destroyed.
    fn sliceable(&mut self, cannot: &'static str) -> Result<(), Fault> {
        let gaps: Vec<String> =
            self.ask::<Outcome<_>>(&Request::SlicingGaps, self.settings.timing.read)?.unwrap_or_default();
        if gaps.is_empty() {
            return Ok(());
        }
        let why = format!("the library has no {}; upgrade the Ascend driver", gaps.join(", no "));
        self.warn_once(&format!("the vendor library cannot {cannot}: {why}"));
        Err(Fault::Unsupported { backend: BACKEND, call: cannot, why })
    }

    fn look<T: DeserializeOwned>(&mut self, request: Request) -> Result<Outcome<T>, Fault> {
        self.ask(&request, self.settings.timing.read)
    }

    /// Reads what a chip says of its vNPUs, what is left of it, and which processes run on it.
    pub(super) fn card(&mut self, physical_id: u32) -> Result<CardReading, Fault> {
        const CANNOT: &str = "read vNPUs";
        let at = self.seat(physical_id)?.at;
        if let Some(fault) = self.uncut.get(&physical_id) {
            return Err(fault.clone());
        }
        self.sliceable(CANNOT)?;
        self.spare(at, Trade::Look)?;
        let mut vnpus = self.vnpus(physical_id, CANNOT)?;
        for _ in 1..READINGS {
            if vnpus.is_some() {
                break;
            }
            vnpus = self.vnpus(physical_id, CANNOT)?;
        }
        let list = Request::Vnpus(at);
        let vnpus = vnpus.ok_or_else(|| Fault::Failed {
            backend: BACKEND,
            call: list.to_string(),
            why: "it lists vnpus that a query does not know".to_owned(),
        })?;
        let request = Request::FreeResources(at);
        let free = match self.look::<Free>(request)? {
            Ok(Free { memory, ai_cores, ai_cpus, jpeg_decoders }) => {
                // A chip that is not cut has all of them: none means that the library does not fill the field.
                let media = jpeg_decoders.filter(|count| *count > 0 || !vnpus.is_empty());
                let media = media.unwrap_or(Resources::MEDIA_UNTOLD);
                ai_cpus.map(|ai_cpus| Resources { memory: memory * MIB, ai_cores, ai_cpus: ai_cpus.into(), media })
            }
            Err(Trouble::Missing | Trouble::Code(ffi::ERR_NOT_SUPPORT)) => None,
            Err(trouble) => return Err(failed(request, trouble)),
        };
        let request = Request::Processes(at);
        let processes = match self.look::<Vec<i32>>(request)? {
            Ok(processes) => Some(processes),
            Err(Trouble::Code(code)) if ffi::GONE.contains(&code) => return Err(failed(request, Trouble::Code(code))),
            Err(trouble) => {
                self.warn_once(&format!(
                    "{request} answered {trouble}; the processes of chip {physical_id} are unknown"
                ));
                None
            }
        };
        self.cleared(at, Trade::Look);
        Ok(CardReading { vnpus, free, processes })
    }

    /// The vNPUs of a chip, by id; `None` if one was destroyed in the middle of it.
    fn vnpus(&mut self, physical_id: u32, cannot: &'static str) -> Result<Option<Vec<VnpuReading>>, Fault> {
        let at = self.seat(physical_id)?.at;
        let mut ids = match self.ids(physical_id)? {
            Ok(ids) => ids,
            Err(trouble) => {
                let fault = fault(Request::Vnpus(at), trouble, cannot);
                if let Fault::Unsupported { why, .. } = &fault {
                    self.warn_once(&format!("chip {physical_id} has no vNPUs that could be read: {why}"));
                    self.uncut.insert(physical_id, fault.clone());
                }
                return Err(fault);
            }
        };
        ids.sort_unstable();
        let mut vnpus = Vec::with_capacity(ids.len());
        for id in ids {
            let request = Request::Vnpu(at, id);
            match self.look::<Vnpu>(request)? {
                Ok(Vnpu { template, memory, ai_cores }) => {
                    vnpus.push(VnpuReading { id, template, memory: memory * MIB, ai_cores });
                }
                Err(Trouble::Code(ffi::ERR_DEVICE_NOT_EXIST)) => return Ok(None),
                Err(trouble) => return Err(failed(request, trouble)),
            }
        }
        Ok(Some(vnpus))
    }

    /// Ids of the vNPUs of a chip, each of them once and in the chip's own range.
    fn ids(&mut self, physical_id: u32) -> Result<Outcome<Vec<u32>>, Fault> {
        let at = self.seat(physical_id)?.at;
        let range = vnpu::ids(physical_id);
        Ok(self.look::<Vec<u32>>(Request::Vnpus(at))?.and_then(|ids| {
            let wrong = |index: usize, id: &u32| !range.contains(id) || ids[..index].contains(id);
            match ids.iter().enumerate().find(|(index, id)| wrong(*index, id)) {
                Some((_, id)) => Err(Trouble::Nonsense((*id).into())),
                None => Ok(ids),
            }
        }))
    }

    /// An id that is one of a chip's own: never that of another chip's vNPU, never the number that stands for all.
    fn own(physical_id: u32, id: u32, call: &str) -> Result<(), Fault> {
        if vnpu::ids(physical_id).contains(&id) {
            return Ok(());
        }
        let why = format!("chip {physical_id} has no vnpu of that number");
        Err(Fault::Failed { backend: BACKEND, call: format!("{call} {id}"), why })
    }

    /// Makes a vNPU; gives the id that it has.
    pub(super) fn create(&mut self, physical_id: u32, template: &str, id: u32) -> Result<u32, Fault> {
        const CANNOT: &str = "make vNPUs";
        Self::own(physical_id, id, "making vnpu")?;
        let name = TemplateName::new(template).ok_or_else(|| Fault::Failed {
            backend: BACKEND,
            call: format!("making vnpu {id}"),
            why: format!("{template:?} is no name of a template"),
        })?;
        let at = self.seat(physical_id)?.at;
        self.sliceable(CANNOT)?;
        self.spare(at, Trade::Cut)?;
        let request = Request::CreateVnpu(at, name, id);
        let outcome = self.ask::<Outcome<u32>>(&request, self.settings.timing.cut)?;
        self.cleared(at, Trade::Cut);
        match outcome {
            Ok(made) if vnpu::ids(physical_id).contains(&made) => Ok(made),
            Ok(made) => Err(explained(request, Trouble::Nonsense(made.into()), "what it made is to be read")),
            Err(trouble @ Trouble::Nonsense(_)) => Err(explained(request, trouble, "what it made is to be read")),
            // The switch to slicing flattens a busy chip to the same code.
            Err(trouble @ Trouble::Code(ffi::ERR_INVALID_PARAMETER)) => Err(explained(
                request,
                trouble,
                "it does not fit into what is left of the chip, or a process runs on the chip, or its driver has no \
                 template of that name",
            )),
            Err(trouble @ Trouble::Code(ffi::ERR_OPER_NOT_PERMITTED)) => Err(explained(
                request,
                trouble,
                "slicing needs root on the host, and a node that cuts for containers (npu-smi set -t vnpu-mode -d 0)",
            )),
            Err(trouble) => Err(fault(request, trouble, CANNOT)),
        }
    }

    /// Destroys one vNPU; one that is not there is success.
    pub(super) fn destroy(&mut self, physical_id: u32, id: u32) -> Result<(), Fault> {
        const CANNOT: &str = "destroy vNPUs";
        Self::own(physical_id, id, "destroying vnpu")?;
        let at = self.seat(physical_id)?.at;
        self.sliceable(CANNOT)?;
        self.spare(at, Trade::Cut)?;
        let request = Request::DestroyVnpu(at, id);
        let outcome = self.ask::<Outcome<()>>(&request, self.settings.timing.cut)?;
        self.cleared(at, Trade::Cut);
        match outcome {
            Ok(()) | Err(Trouble::Code(ffi::ERR_DEVICE_NOT_EXIST)) => Ok(()),
            Err(trouble @ Trouble::Code(ffi::ERR_INVALID_PARAMETER)) => match self.ids(physical_id)? {
                Ok(ids) if !ids.contains(&id) => Ok(()),
                Ok(_) => Err(busy(request, trouble, "it is in use; end the container that has it open")),
                Err(_) => Err(failed(request, trouble)),
            },
            Err(trouble) => Err(fault(request, trouble, CANNOT)),
        }
    }

    /// Reads how the vendor's own software deals with vNPUs on this node.
    pub(super) fn vendor(&mut self) -> Result<VendorMode, Fault> {
        self.started()?;
        self.sliceable("cut cards")?;
        self.spare(NODE, Trade::Look)?;
        let virtual_machines = match self.look::<i32>(Request::VnpuMode)? {
            Ok(mode) => Some(mode == ffi::VDEVICE_VM),
            Err(trouble) => {
                self.warn_once(&format!("{} answered {trouble}; the mode is unknown", Request::VnpuMode));
                None
            }
        };
        let path = self.settings.host_root.join("etc/vnpu.cfg");
        let list = BootList::read(&path);
        // It waits for the lock of the vendor's list, so it has more time than other reads.
        let replay = match self.ask::<Outcome<bool>>(&Request::Replay, self.settings.timing.cut)? {
            Ok(on) => Some(on),
            Err(trouble) => {
                self.warn_once(&format!("{} answered {trouble}; {} decides", Request::Replay, path.display()));
                list.as_ref().ok().and_then(|list| list.replay)
            }
        };
        self.cleared(NODE, Trade::Look);
        let listed = match list {
            Ok(list) => list.ids,
            Err(_) if replay == Some(false) => Vec::new(),
            // What may come back is unknown, which is not the same as nothing.
            Err(error) => {
                return Err(Fault::Failed {
                    backend: BACKEND,
                    call: format!("reading {}", path.display()),
                    why: error.to_string(),
                });
            }
        };
        Ok(VendorMode { replay, listed, virtual_machines })
    }

    /// Switches the vendor's replay of vNPUs after a boot on or off.
    pub(super) fn set_replay(&mut self, on: bool) -> Result<(), Fault> {
        self.started()?;
        self.spare(NODE, Trade::Cut)?;
        let request = Request::SetReplay(on);
        let outcome = self.ask::<Outcome<()>>(&request, self.settings.timing.cut)?;
        self.cleared(NODE, Trade::Cut);
        outcome.map_err(|trouble| match trouble {
            Trouble::Code(ffi::ERR_INNER_ERR) => {
                explained(request, trouble, "/etc/vnpu.cfg or its lock cannot be used, or another process works on it")
            }
            trouble => fault(request, trouble, "switch the vNPU replay"),
        })
    }
}
