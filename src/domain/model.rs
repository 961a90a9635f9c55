//! How a node that is cut shows itself to the scheduler: which slicing model, and why not a better one.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};

/// A slicing model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Model {
    /// One shared device a card; a claim asks for memory, the scheduler accounts by consumed capacity.
    Consumable,
    /// Whole cards and one device for each template slot, tied by counters.
    Partitionable,
    /// The administrator's layout, as plain devices.
    Static,
    /// Whole cards.
    Off,
}

impl Model {
    /// Name as in the configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Consumable => "consumable",
            Self::Partitionable => "partitionable",
            Self::Static => "static",
            Self::Off => "off",
        }
    }
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What the API server keeps of the fields that the models need; `None` while it is not known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Kept {
    /// `DRAConsumableCapacity`.
    pub consumable: Option<bool>,
    /// `DRAPartitionableDevices`.
    pub partitionable: Option<bool>,
    /// True for 1.34: counters and devices stand in one slice, and the scheduler checks shared capacity against the
    /// wrong device (kubernetes/kubernetes issue 133705).
    pub is_1_34: bool,
}

/// What the administrator wants.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wish {
    /// True with `--enable-hard-vnpu`.
    pub enabled: bool,
    /// A model, or `None` for the best that the API server keeps.
    pub model: Option<Model>,
    /// Templates by card name, for the static model.
    pub layout: BTreeMap<String, Vec<String>>,
}

/// A model, and why it is not a better one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The model.
    pub model: Model,
    /// Why; empty if it is the best or the one that was asked for.
    pub why: String,
}

const NO_CONSUMABLE: &str = "the API server does not keep DRAConsumableCapacity";
const NO_PARTITIONABLE: &str = "the API server does not keep DRAPartitionableDevices";

/// Chooses the model; `None` while the API server has not said what it keeps, and it matters.
pub fn choose(wish: &Wish, kept: Kept) -> Option<Choice> {
    let choice = |model, why: String| Some(Choice { model, why });
    if !wish.enabled {
        return choice(Model::Off, "hard slicing is not enabled (--enable-hard-vnpu)".to_owned());
    }
    let fallback = |why: &str| {
        if wish.layout.is_empty() {
            choice(Model::Off, format!("{why}; no static layout is given (slicing.layout)"))
        } else {
            choice(Model::Static, why.to_owned())
        }
    };
    match wish.model {
        Some(Model::Off) => choice(Model::Off, "slicing.model is off".to_owned()),
        Some(Model::Static) if wish.layout.is_empty() => {
            choice(Model::Off, "slicing.model is static, but no layout is given (slicing.layout)".to_owned())
        }
        Some(Model::Static) => choice(Model::Static, String::new()),
        Some(Model::Consumable) | None if kept.consumable? => choice(Model::Consumable, unguarded(kept)),
        Some(Model::Consumable) => choice(Model::Off, format!("slicing.model is consumable, but {NO_CONSUMABLE}")),
        Some(Model::Partitionable) if kept.partitionable? => choice(Model::Partitionable, String::new()),
        Some(Model::Partitionable) => {
            choice(Model::Off, format!("slicing.model is partitionable, but {NO_PARTITIONABLE}"))
        }
        None if kept.partitionable? => choice(Model::Partitionable, NO_CONSUMABLE.to_owned()),
        None => fallback(&format!("{NO_CONSUMABLE} and {NO_PARTITIONABLE}")),
    }
}

/// What is wrong with the consumable model on a 1.34 server without counters.
fn unguarded(kept: Kept) -> String {
    if kept.is_1_34 && kept.partitionable == Some(false) {
        "on Kubernetes 1.34 the placeholders are guarded only with DRAPartitionableDevices: switch that gate on too"
            .to_owned()
    } else {
        String::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wish(model: Option<Model>, layout: bool) -> Wish {
        let layout = layout.then(|| ("npu-0".to_owned(), vec!["vir05_1c_8g".to_owned()])).into_iter().collect();
        Wish { enabled: true, model, layout }
    }

    fn kept(consumable: bool, partitionable: bool) -> Kept {
        Kept { consumable: Some(consumable), partitionable: Some(partitionable), is_1_34: false }
    }

    #[test]
    fn auto_takes_the_first_that_the_server_keeps() {
        let model = |layout, kept| choose(&wish(None, layout), kept).unwrap().model;
        assert_eq!(model(true, kept(true, true)), Model::Consumable);
        assert_eq!(model(true, kept(false, true)), Model::Partitionable);
        assert_eq!(model(true, kept(false, false)), Model::Static);
        assert_eq!(model(false, kept(false, false)), Model::Off);
    }

    #[test]
    fn a_model_that_the_server_does_not_keep_is_off_and_says_why() {
        let why = |model, kept| choose(&wish(Some(model), true), kept).unwrap();
        let off = why(Model::Consumable, kept(false, true));
        assert_eq!((off.model, off.why.contains("DRAConsumableCapacity")), (Model::Off, true));
        let off = why(Model::Partitionable, kept(true, false));
        assert_eq!((off.model, off.why.contains("DRAPartitionableDevices")), (Model::Off, true));
        assert_eq!(why(Model::Static, Kept::default()).model, Model::Static);
        assert_eq!(choose(&wish(Some(Model::Static), false), Kept::default()).unwrap().model, Model::Off);
    }

    #[test]
    fn nothing_is_chosen_while_the_server_has_not_answered() {
        assert_eq!(choose(&wish(None, true), Kept::default()), None);
        assert_eq!(
            choose(&Wish::default(), Kept::default()).unwrap().model,
            Model::Off,
            "without slicing it does not matter"
        );
    }

    #[test]
    fn an_unguarded_1_34_says_which_gate_is_missing() {
        let bare = Kept { is_1_34: true, ..kept(true, false) };
        assert!(choose(&wish(None, false), bare).unwrap().why.contains("switch that gate on too"));
        let guarded = Kept { is_1_34: true, ..kept(true, true) };
        assert_eq!(choose(&wish(None, false), guarded).unwrap().why, "");
    }
}
