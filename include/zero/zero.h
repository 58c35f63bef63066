// All public headers of the library but cuda.h.
#pragma once

#include "zero/backend.h"
#include "zero/communicator.h"
#include "zero/cpu.h"
#include "zero/dtype.h"
#include "zero/error.h"
#include "zero/launch.h"
#include "zero/ledger.h"
#include "zero/make_rule.h"
#include "zero/model.h"
#include "zero/optimizer.h"
#include "zero/options.h"
#include "zero/plan.h"
#include "zero/safetensors.h"
#include "zero/update_rule.h"
