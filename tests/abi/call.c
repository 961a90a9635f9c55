/* Loads a libdcmi.so as any C program would and makes the calls that the command line lists, through the prototypes of
 * dcmi.h: "call LIBRARY init list health 3 0". Each command prints one line: its name, the code, the results. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "dcmi.h"

static void *library;
static char **next;
static atomic_int events;

#define FUNCTION(name) ((__typeof__(name) *)symbol(#name))

static void *symbol(const char *name) {
    void *found = dlsym(library, name);
    if (found == NULL) {
        fprintf(stderr, "no symbol %s\n", name);
        exit(3);
    }
    return found;
}

static int number(void) {
    if (*next == NULL) {
        fprintf(stderr, "an argument is missing\n");
        exit(2);
    }
    return (int)strtol(*next++, NULL, 0);
}

static void on_event(struct dcmi_event *event) {
    struct dcmi_dms_fault_event *fault = &event->event_t.dms_event;
    printf("event %d %08X logic %u severity %u assertion %u\n", (int)event->type, fault->event_id, fault->deviceid,
           fault->severity, fault->assertion);
    fflush(stdout);
    atomic_fetch_add(&events, 1);
}

static long long now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void list(void) {
    int ids[DCMI_MAX_CARDS], count = 0;
    int code = FUNCTION(dcmi_get_card_list)(&count, ids, DCMI_MAX_CARDS);
    printf("list %d", code);
    for (int i = 0; code == 0 && i < count; i++) printf(" %d", ids[i]);
    printf("\n");
}

static void create(void) {
    struct dcmi_create_vdev_res_stru wish = {0};
    struct dcmi_create_vdev_out out = {0};
    int card = number(), device = number();
    snprintf(wish.template_name, sizeof wish.template_name, "%s", *next++);
    wish.vdev_id = (unsigned int)strtoul(*next++, NULL, 0);
    wish.vfg_id = DCMI_VDEV_ID_AUTO;
    int code = FUNCTION(dcmi_create_vdevice)(card, device, &wish, &out);
    printf("create %d %u\n", code, out.vdev_id);
}

static void total(void) {
    struct dcmi_soc_total_resource total = {0};
    unsigned int size = sizeof total;
    int card = number(), device = number();
    int code = FUNCTION(dcmi_get_device_info)(card, device, DCMI_MAIN_VDEV_MNG, DCMI_VDEV_GET_TOTAL, &total, &size);
    printf("total %d %u", code, size);
    for (unsigned int i = 0; i < total.vdev_num; i++) printf(" %u", total.vdev_id[i]);
    printf("\n");
}

/* Filter by value: it also asks for one code only, to prove that its fields arrive. */
static void subscribe(void) {
    struct dcmi_event_filter filter = {0};
    filter.event_id = (unsigned int)strtoul(*next++, NULL, 0);
    filter.filter_flag = filter.event_id == 0 ? 0 : DCMI_FILTER_EVENT_ID;
    int code = FUNCTION(dcmi_subscribe_fault_event)(-1, -1, filter, on_event);
    printf("subscribe %d\n", code);
}

static void await(int wanted) {
    struct timespec pause = {0, 1000000};
    for (int i = 0; i < 10000 && atomic_load(&events) < wanted; i++) nanosleep(&pause, NULL);
    printf("await %d\n", atomic_load(&events));
}

static void bench(int rounds) {
    int ids[DCMI_MAX_CARDS], count = 0;
    unsigned int health, codes[DCMI_MAX_ERROR_CODES];
    FUNCTION(dcmi_get_card_list)(&count, ids, DCMI_MAX_CARDS);
    long long start = now_ns(), calls = 0, failures = 0;
    for (int round = 0; round < rounds; round++) {
        for (int i = 0; i < count; i++) {
            struct dcmi_hbm_info hbm;
            int found;
            failures += FUNCTION(dcmi_get_device_health)(ids[i], 0, &health) != 0;
            failures += FUNCTION(dcmi_get_device_errorcode_v2)(ids[i], 0, &found, codes, DCMI_MAX_ERROR_CODES) != 0;
            failures += FUNCTION(dcmi_get_device_hbm_info)(ids[i], 0, &hbm) != 0;
            calls += 3;
        }
    }
    printf("bench %lld %lld\n", failures, calls == 0 ? 0 : (now_ns() - start) / calls);
}

static int command(const char *name) {
    if (strcmp(name, "init") == 0) {
        printf("init %d\n", FUNCTION(dcmi_init)());
    } else if (strcmp(name, "list") == 0) {
        list();
    } else if (strcmp(name, "has") == 0) {
        printf("has %s\n", dlsym(library, *next++) == NULL ? "no" : "yes");
    } else if (strcmp(name, "health") == 0) {
        int card = number(), device = number();
        unsigned int health = 99;
        int code = FUNCTION(dcmi_get_device_health)(card, device, &health);
        printf("health %d %u\n", code, health);
    } else if (strcmp(name, "logic") == 0) {
        int card = number(), device = number(), logic = 99;
        int code = FUNCTION(dcmi_get_device_logic_id)(&logic, card, device);
        printf("logic %d %d\n", code, logic);
    } else if (strcmp(name, "die") == 0) {
        struct dcmi_die_id id = {0};
        int card = number(), device = number();
        int code = FUNCTION(dcmi_get_device_die_v2)(card, device, DCMI_DIE_VDIE, &id);
        printf("die %d", code);
        for (int i = 0; i < 5; i++) printf("%c%08X", i == 0 ? ' ' : '-', id.soc_die[i]);
        printf("\n");
    } else if (strcmp(name, "pci") == 0) {
        struct dcmi_pcie_info_all pci = {0};
        int card = number(), device = number();
        int code = FUNCTION(dcmi_get_device_pcie_info_v2)(card, device, &pci);
        printf("pci %d %04x:%02x:%02x.%x\n", code, (unsigned int)pci.domain, pci.bdf_busid, pci.bdf_deviceid,
               pci.bdf_funcid);
    } else if (strcmp(name, "topo") == 0) {
        int a = number(), b = number(), c = number(), d = number(), kind = 99;
        int code = FUNCTION(dcmi_get_topo_info_by_device_id)(a, b, c, d, &kind);
        printf("topo %d %d\n", code, kind);
    } else if (strcmp(name, "create") == 0) {
        create();
    } else if (strcmp(name, "destroy") == 0) {
        int card = number(), device = number();
        printf("destroy %d\n", FUNCTION(dcmi_set_destroy_vdevice)(card, device, (unsigned int)number()));
    } else if (strcmp(name, "total") == 0) {
        total();
    } else if (strcmp(name, "subscribe") == 0) {
        subscribe();
    } else if (strcmp(name, "await") == 0) {
        await(number());
    } else if (strcmp(name, "bench") == 0) {
        bench(number());
    } else {
        fprintf(stderr, "unknown command %s\n", name);
        return 2;
    }
    fflush(stdout);
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    library = dlopen(argv[1], RTLD_LAZY | RTLD_GLOBAL);
    if (library == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return 4;
    }
    int result = 0;
    for (next = argv + 2; result == 0 && *next != NULL;) result = command(*next++);
    return result;
}
